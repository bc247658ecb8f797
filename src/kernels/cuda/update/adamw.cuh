// AdamW. Bytes per element, f32: 16 in, 12 out (+ 2 out for a half-precision copy); with moments in bf16 12 in, 8 out.
//
//   m += (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2
//   p = p decay - step_size m / (sqrt(v) / second_correction + eps)
//
// with decay = 1 - lr weight_decay, step_size = lr / (1 - beta1^t), second_correction = sqrt(1 - beta2^t).

struct AdamW {
    static const int STATES = 2; // exp_avg, exp_avg_sq
    static const bool CLIPS = true;
    float decay, one_minus_beta1, beta2, one_minus_beta2, step_size, second_correction, eps;

    __device__ __forceinline__ void step(float* p, float g, float* states) const {
        float &m = states[0], &v = states[1];
        m = add(m, mul(one_minus_beta1, sub(g, m)));
        v = add(mul(v, beta2), mul(mul(one_minus_beta2, g), g));
        float denominator = add(__fdiv_rn(__fsqrt_rn(v), second_correction), eps);
        *p = sub(mul(*p, decay), __fdiv_rn(mul(step_size, m), denominator));
    }
};
