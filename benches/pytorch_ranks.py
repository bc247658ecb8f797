"""Training steps of several GPUs in PyTorch: DDP, ZeRO stage 1 and FSDP2, to compare distributed_benchmark with.

    python3 -m torch.distributed.run --nproc_per_node 2 benches/pytorch_ranks.py --config CONFIG.json \
        [--strategy alone ddp zero1 fsdp2] [--batch-size 4] [--context-length 256] [--checkpoint] [--steps 10]

CONFIG.json is a Llama's config.json (examples/families/llama-3.1-8b), or has the same keys. Matmuls are in bf16 (autocast;
with FSDP2 its mixed precision), parameters, gradients' sums and AdamW's state in f32. Attention is SDPA. Each block is
compiled. Rank 0 prints a JSON line for each strategy: the median and all times of a step in milliseconds, and the
peak of its memory.
"""

import argparse
import gc
import json
import os
import statistics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


def linear(n, m):
    return nn.Linear(n, m, bias=False)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, heads = c["hidden_size"], c["num_attention_heads"]
        self.groups = c.get("num_key_value_heads", heads)
        self.width = d // heads
        self.norm1, self.norm2 = (nn.RMSNorm(d, eps=c["rms_norm_eps"]) for _ in range(2))
        self.q, self.out = linear(d, d), linear(d, d)
        self.k, self.v = (linear(d, self.groups * self.width) for _ in range(2))
        self.gate, self.up = (linear(d, c["intermediate_size"]) for _ in range(2))
        self.down = linear(c["intermediate_size"], d)

    def forward(self, x, cos, sin):
        def heads(y):  # (B, T, D) -> (B, H, T, D / H)
            return y.unflatten(-1, (-1, self.width)).transpose(1, 2)

        def rotate(y):
            a, b = y.chunk(2, -1)
            return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(y.dtype)

        y = self.norm1(x)
        q, k, v = rotate(heads(self.q(y))), rotate(heads(self.k(y))), heads(self.v(y))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.groups != q.shape[1])
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self, c, length, recomputes):
        super().__init__()
        d = c["hidden_size"]
        self.recomputes = recomputes
        self.embedding = nn.Embedding(c["vocab_size"], d)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c["num_hidden_layers"]))
        self.norm, self.head = nn.RMSNorm(d, eps=c["rms_norm_eps"]), linear(d, c["vocab_size"])
        width = d // c["num_attention_heads"]
        inverse = c["rope_theta"] ** (-torch.arange(0, width, 2, device="cuda") / width)
        angles = torch.arange(length, device="cuda")[:, None] * inverse
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.recomputes:
                x = checkpoint(block, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def distributed(model, strategy):
    """Returns the model and the optimizer of a strategy."""
    if strategy == "fsdp2":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in [*model.blocks, model]:
            fully_shard(module, mp_policy=policy)
    elif strategy != "alone":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    if strategy == "zero1":
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def measure(flags, config, strategy):
    torch.manual_seed(0)
    b, t = flags.batch_size, flags.context_length
    with torch.device("meta" if strategy == "fsdp2" else "cuda"):
        model = Model(config, t, flags.checkpoint)
    for block in model.blocks:
        block.compile()
    model, optimizer = distributed(model, strategy)
    if strategy == "fsdp2":
        model.to_empty(device="cuda")
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
    tokens, targets = (torch.randint(config["vocab_size"], (b, t), device="cuda") for _ in range(2))

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=strategy != "fsdp2"):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()

    times = []
    for _ in range(flags.steps + 4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return {
        "median_ms": statistics.median(times[4:]),
        "times_ms": times[4:],
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("--config", required=True)
    flags.add_argument("--strategy", nargs="+", default=["alone", "ddp", "zero1", "fsdp2"])
    flags.add_argument("--batch-size", type=int, default=4)
    flags.add_argument("--context-length", type=int, default=256)
    flags.add_argument("--checkpoint", action="store_true", help="recompute each block in backward")
    flags.add_argument("--steps", type=int, default=10)
    flags = flags.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    with open(flags.config) as file:
        config = json.load(file)
    for strategy in flags.strategy:
        torch._dynamo.reset()
        gc.collect()  # the model before is part of a cycle
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        row = {"strategy": strategy, "torch": torch.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        try:
            row.update(measure(flags, config, strategy))
        except torch.OutOfMemoryError:
            row["status"] = "OOM"
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
