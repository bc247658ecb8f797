"""The same model and step as examples/e2e_benchmark in PyTorch, to hold ours against.

    python3 benches/pytorch_e2e.py [--size tiny|small] [--compile] [--sdpa] [--threads 2] [--steps 12]

Prints one JSON line: medians in milliseconds and the process's resident peak. Run it and the example in turn, several
times: machines drift.
"""

import argparse
import json
import math
import resource
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

V, T, BATCH = 10_000, 256, 4
SIZES = {"tiny": (512, 1344, 4, 16), "small": (768, 3072, 12, 12)}  # D, F, L, H
D, FF, LAYERS, HEADS = SIZES["tiny"]
SDPA = False


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x):
        return F.rms_norm(x, (D,), self.weight, 1e-5)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = Norm(), Norm()
        self.q, self.k, self.v, self.out = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.w1, self.w3 = (nn.Linear(D, FF, bias=False) for _ in range(2))
        self.w2 = nn.Linear(FF, D, bias=False)

    def forward(self, x, cos, sin, visible):
        def heads(y):  # (B, T, D) -> (B, H, T, Dh)
            return y.view(BATCH, T, HEADS, D // HEADS).transpose(1, 2)

        def rotate(y):
            even, odd = y[..., 0::2], y[..., 1::2]
            return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)

        y = self.ln1(x)
        q, k, v = rotate(heads(self.q(y))), rotate(heads(self.k(y))), heads(self.v(y))
        if SDPA:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(D // HEADS)
            scores = torch.where(visible, scores, float("-inf"))
            y = torch.softmax(scores, -1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(BATCH, T, D))
        y = self.ln2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = Norm(), nn.Linear(D, V, bias=False)
        inverse = 10_000.0 ** (-torch.arange(0, D // HEADS, 2) * HEADS / D)
        angles = torch.arange(T)[:, None] * inverse
        self.cos, self.sin = angles.cos(), angles.sin()
        self.visible = torch.ones(T, T, dtype=torch.bool).tril()

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin, self.visible)
        return self.head(self.norm(x))


def main():
    global D, FF, LAYERS, HEADS, SDPA
    flags = argparse.ArgumentParser()
    flags.add_argument("--size", choices=SIZES, default="tiny")
    flags.add_argument("--compile", action="store_true")
    flags.add_argument("--sdpa", action="store_true")
    flags.add_argument("--threads", type=int, default=2)
    flags.add_argument("--steps", type=int, default=12)
    flags = flags.parse_args()
    torch.set_num_threads(flags.threads)
    torch.manual_seed(0)
    D, FF, LAYERS, HEADS = SIZES[flags.size]
    SDPA = flags.sdpa
    module = Model()
    model = torch.compile(module) if flags.compile else module
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    tokens, targets = (torch.randint(V, (BATCH, T)) for _ in range(2))

    def forward():
        with torch.no_grad():
            model(tokens)

    def forward_backward():
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()

    def step():
        forward_backward()
        optimizer.step()

    def median_ms(work):
        times = []
        for _ in range(flags.steps + 3):
            start = time.perf_counter()
            work()
            times.append(1e3 * (time.perf_counter() - start))
        return round(statistics.median(times[3:]), 1)

    row = {f.__name__: median_ms(f) for f in (forward, forward_backward, step)}
    row["parameters"] = sum(p.numel() for p in module.parameters())
    row["resident_peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    settings = {name: getattr(flags, name) for name in ("size", "compile", "sdpa", "threads")}
    print(json.dumps({"torch": torch.__version__, **settings, **row}))


if __name__ == "__main__":
    main()
