// SGD. Bytes per element, f32: 8 in, 4 out, with momentum 12 in, 8 out.
//
//   g += weight_decay p;  p -= lr g
//   with momentum: b = momentum b + share g, and g + momentum b (Nesterov) or b instead of g

struct Sgd {
    static const int STATES = 0;
    static const bool CLIPS = true;
    float lr, weight_decay;

    __device__ __forceinline__ void step(float* p, float g, float*) const {
        g = add(g, mul(weight_decay, *p));
        *p = sub(*p, mul(lr, g));
    }
};

struct SgdMomentum {
    static const int STATES = 1; // momentum_buffer
    static const bool CLIPS = true;
    float lr, weight_decay, momentum, share, nesterov;

    __device__ __forceinline__ void step(float* p, float g, float* states) const {
        g = add(g, mul(weight_decay, *p));
        float buffer = add(mul(momentum, states[0]), mul(share, g));
        float ahead = add(g, mul(momentum, buffer));
        *p = sub(*p, mul(lr, nesterov > 0.f ? ahead : buffer));
        states[0] = buffer;
    }
};
