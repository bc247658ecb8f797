// Many tensors in one launch, by tables that the host writes to the device once: a Tensor for each parameter and, in
// the same order, a Chunk for every CHUNK elements. Launches over some parameters begin at the first one's chunk.
//
// Values that change from step to step (Update, Clip, scales) are also read from device memory. A captured graph can
// thus be replayed, and nothing waits for the host.

const int CHUNK = 8192; // elements per block

struct Tensor {
    float* parameter; // (n); the master weight of a parameter in half precision
    void* gradient;   // (n)
    void* states[2];  // (n) each, or null
    void* copy;       // (n), the parameter rounded to half precision, or null
    long long n;
    int group;       // the index of the Update
    int first_chunk; // in the table of chunks
};

struct Chunk {
    int tensor;
    int index; // elements from CHUNK * index on
};

struct Update {
    float coefficients[7]; // those of the rule, in the order of its struct
    unsigned rounding;     // the key of the stochastic rounding of moments in bf16
    float clip_value;      // the bound of each gradient element
};

struct Clip {
    double norm;    // of all gradients
    double factor;  // the factor of all gradients
    int skip;       // 1: a gradient or the norm is not finite, and the update changes nothing
    int non_finite; // the first tensor with an infinite or NaN gradient, or -1
};

// Returns the first element of a chunk in its tensor; `count` receives the number of its elements.
__device__ __forceinline__ long long begin_of(const Chunk& chunk, const Tensor& tensor, int* count) {
    long long start = (long long)chunk.index * CHUNK, left = tensor.n - start;
    *count = left < CHUNK ? (int)left : CHUNK;
    return start;
}
