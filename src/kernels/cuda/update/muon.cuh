// The elementwise passes of Muon's update. Bytes per element, f32: 16 in, 8 out; 8 in, 4 out.
//
//   b += (1 - momentum) (g - b);  direction = g + momentum (b - g) (Nesterov) or b
//   p  = decay p - step_size orthogonal(direction)

// Writes the direction in place of the parameter.
struct MuonDirection {
    static const int STATES = 1; // momentum_buffer
    static const bool CLIPS = true;
    float momentum, nesterov, decay, step_size;

    __device__ __forceinline__ void step(float* p, float g, float* states) const {
        float buffer = add(states[0], mul(sub(1.f, momentum), sub(g, states[0])));
        float ahead = add(g, mul(momentum, sub(buffer, g)));
        *p = nesterov > 0.f ? ahead : buffer;
        states[0] = buffer;
    }
};

// Reads the orthogonal direction in place of the gradient.
struct Muon {
    static const int STATES = 0;
    static const bool CLIPS = false;
    float momentum, nesterov, decay, step_size;

    __device__ __forceinline__ void step(float* p, float g, float*) const {
        *p = sub(mul(*p, decay), mul(step_size, g));
    }
};
