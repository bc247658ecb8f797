// Lion. Bytes per element, f32: 12 in, 8 out.
//
//   c = m + (1 - beta1) (g - m);  p = p decay - lr sign(c);  m += (1 - beta2) (g - m)
//
// with decay = 1 - lr weight_decay. The sign of NaN is NaN.

struct Lion {
    static const int STATES = 1; // exp_avg
    static const bool CLIPS = true;
    float decay, one_minus_beta1, one_minus_beta2, lr;

    __device__ __forceinline__ void step(float* p, float g, float* states) const {
        float m = states[0], difference = sub(g, m);
        float c = add(m, mul(one_minus_beta1, difference));
        float sign = c > 0.f ? 1.f : c < 0.f ? -1.f : c;
        *p = sub(mul(*p, decay), mul(lr, sign));
        states[0] = add(m, mul(one_minus_beta2, difference));
    }
};
