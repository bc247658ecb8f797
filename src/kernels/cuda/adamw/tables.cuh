// Many tensors in one launch: tables that the host lays out on the device once, a Tensor for each parameter and a Chunk
// for each CHUNK elements of each, in order. A launch over some of the parameters begins at the first one's first
// chunk.
//
// What changes from step to step (Update, Clip, scales) is read from device memory too, so that a captured graph can be
// replayed, and nothing waits for the host.

const int CHUNK = 8192; // elements of a block

struct Tensor {
    float* parameter; // (n); of a parameter in half precision its exact value
    void* gradient;   // (n)
    void* first;      // (n), exp_avg
    void* second;     // (n), exp_avg_sq
    void* copy;       // (n), the parameter rounded to half precision, or null
    long long n;
    int group;       // which Update
    int first_chunk; // of the table
};

struct Chunk {
    int tensor;
    int index; // elements CHUNK * index .. of it
};

struct Update {
    float decay, first_share, beta2, second_share, step_size, second_correction, eps;
    unsigned rounding; // the key by which moments in bf16 are rounded
    float clip_value;  // gradients are clipped to it, element by element
};

struct Clip {
    double norm;    // of all gradients
    double factor;  // what they are multiplied by
    int skip;       // 1: a gradient or the norm is not finite, and AdamW leaves everything as it is
    int non_finite; // the first tensor with an infinite or NaN gradient, or -1
};

// Where in its tensor the chunk begins, and how many elements it has.
__device__ __forceinline__ long long begin_of(const Chunk& chunk, const Tensor& tensor, int* count) {
    long long start = (long long)chunk.index * CHUNK, left = tensor.n - start;
    *count = left < CHUNK ? (int)left : CHUNK;
    return start;
}
