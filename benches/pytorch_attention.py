"""PyTorch's scaled_dot_product_attention on the CPU, to hold examples/attention_benchmark against.

    python3 benches/pytorch_attention.py [--threads 2] [--steps 7] [--dtype bfloat16]

Prints one JSON line a shape: medians in milliseconds, of forward without a graph and of forward and backward. Run it
and the example in turn, several times: machines drift.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F

SHAPES = [((8, 1, 4096, 64), False), ((1, 12, 2048, 64), True)]  # (B, H, T, Dh), causal


def milliseconds(run):
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def measure(shape, causal, steps, dtype):
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    d_out = torch.randn(shape, dtype=dtype)

    def attend():
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def forward():
        with torch.no_grad():
            attend()

    def forward_backward():
        attend().backward(d_out)

    times = [(milliseconds(forward), milliseconds(forward_backward)) for _ in range(2 + steps)][2:]  # two to warm up
    return [round(statistics.median(column), 1) for column in zip(*times)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16, float16")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for shape, causal in SHAPES:
        forward, forward_backward = measure(shape, causal, arguments.steps, getattr(torch, arguments.dtype))
        row = {"torch": torch.__version__, "shape": shape, "causal": causal}
        row |= {"threads": arguments.threads, "dtype": arguments.dtype}
        print(json.dumps({**row, "forward": forward, "forward_backward": forward_backward}), flush=True)


main()
