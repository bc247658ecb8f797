"""Measures N GPUs of one host, and prints the results as Markdown: tests, collectives, training steps by strategy beside
their estimates and PyTorch's DDP, ZeRO stage 1 and FSDP2, and a training run that is killed and resumed by half of the
GPUs.

    cargo build --release --features cuda --example distributed_benchmark --example e2e_benchmark --example train
    cargo test --release --no-run --features cuda --test distributed   # prints the program of --tests
    python3 benches/several_gpus.py --gpus 8 --tests target/release/deps/distributed-HASH > results.md

Each estimate is made before its step runs: from the plan, the step of one GPU alone and the rates of the collectives.
A part that fails is reported in its place, the others still run, and the exit code is 1.
"""

import argparse
import functools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

# Model, batch and tokens of a rank, size of a bucket, strategies. The preset 2.7b is CS336's xl of 2026.
REPLICATED = ["replicated", "sharded-optimizer", "fully-shard"]
SHARDED = ["fully-shard"]
STEPS = [
    ("small", 4, 256, 50, REPLICATED),
    ("xl", 4, 256, 400, REPLICATED),
    ("xl", 4, 1024, 400, REPLICATED),
    ("llama-3.1-8b", 1, 8192, 512, SHARDED),
]
PEERS = {"replicated": "ddp", "sharded optimizer": "zero1", "fully shard": "fsdp2"}
# The presets as PyTorch's model reads them: width, feed-forward, blocks, heads.
PRESETS = {"small": (768, 3072, 12, 12), "xl": (1600, 6400, 48, 25)}
# The share of an exchange's time that kernels lose next to it, as fitted to steps of two H200s (RESULTS.md).
CONTENTION = 0.4
HERE = os.path.dirname(os.path.abspath(__file__))
LLAMA = os.path.join(HERE, "..", "examples", "families", "llama-3.1-8b")


def note(text):
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


class Run:
    def __init__(self, flags):
        self.flags = flags
        self.failed = []

    def program(self, name):
        return os.path.join(self.flags.binaries, name)

    def json(self, name, *flags):
        """Returns the report of an example."""
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [self.program(name), *map(str, flags), "--format", "json", "--output", file.name]
            note(" ".join(command))
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            with open(file.name) as report:
                return json.load(report)

    def part(self, name):
        """Runs a part; if it fails, the others still run."""
        print(f"\n## {name}\n", flush=True)
        try:
            getattr(self, name.split()[0])()
        except Exception as error:  # the other parts still run
            self.failed.append(name)
            print(f"\nFailed: {type(error).__name__}: {error}", flush=True)

    def tests(self):
        if self.flags.tests is None:
            raise RuntimeError("--tests names no program: cargo test --no-run prints its path")
        command = [self.flags.tests, "--ignored", "--test-threads", "1"]
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(run.stdout.splitlines()[-2])
        if run.returncode != 0:
            raise RuntimeError(run.stdout)

    @functools.cache
    def rates(self, gpus):
        """Measures once the times of each collective by size in MiB. Returns them, and the estimates' flags by them."""
        report = self.json("distributed_benchmark", "--gpus", gpus, "--part", "collectives", "--mib", 1, 25, 100, 1024)
        rows = {(row["collective"], row["mib"]): row for row in report["rows"]}
        gather = min(rows[name, 1024]["bus_gb_s"] for name in ("reduce_scatter", "all_gather"))
        # A small buffer's time is mostly overhead.
        us = min(1e3 * rows[name, 1]["median_ms"] for name in ("all_reduce", "reduce_scatter", "all_gather"))
        rates = {"--reduce-gb-s": rows["all_reduce", 1024]["bus_gb_s"], "--gather-gb-s": gather, "--exchange-us": us}
        return rows, [word for flag, rate in rates.items() for word in (flag, f"{rate:.1f}")]

    def collectives(self):
        for gpus in sorted({2, self.flags.gpus}):
            rows, rates = self.rates(gpus)
            print(f"\n{gpus} GPUs, bus rate in GB/s by MiB; estimates take {' '.join(rates)}:\n")
            sizes = sorted({mib for _, mib in rows})
            print("| collective |", *(f"{mib} |" for mib in sizes))
            print("|---|" + "---:|" * len(sizes))
            for name in dict.fromkeys(name for name, _ in rows):
                print(f"| {name} |", *(f"{rows[name, mib]['bus_gb_s']:.0f} |" for mib in sizes), flush=True)

    def steps(self):
        _, rates = self.rates(self.flags.gpus)
        print("Medians in ms; tallow exchanges gradients in bf16. Alone is one GPU of the same kind.")
        print(f"Estimates take {' '.join(rates)} --contention {CONTENTION}.\n")
        print("| model | strategy | gradients averaged | alone | estimate | step | off by | alone / step | tokens/s a GPU |")
        print("|---|---|---|---:|---:|---:|---:|---:|---:|", flush=True)
        for config in self.configurations():
            self.step(config, rates)

    def configurations(self):
        named = self.flags.models
        return [config for config in STEPS if named is None or config[0] in named]

    def step(self, config, rates):
        name, batch, length, mib, strategies = config
        model = ["--family", LLAMA] if name == "llama-3.1-8b" else ["--size", name]
        model += ["--batch-size", batch, "--context-length", length, "--precision", "bf16", "--attention", "flash"]
        timed = ["--warmup-steps", 3, "--steps", self.flags.steps]
        alone = self.json(
            "e2e_benchmark", *model, *timed, "--mode", "train-step", "--compile=only", "--device", "cuda:0"
        )
        alone = [row for row in alone["rows"] if row["phase"] == "train step"][0].get("median_ms")
        common = [*model, "--strategy", *strategies, "--bucket-mib", mib, "--exchange-bf16"]
        fitted = [] if alone is None else ["--alone-ms", alone]
        estimates = self.json(
            "distributed_benchmark", *common, "--part", "paper", "--world-size", self.flags.gpus, "--contention",
            CONTENTION, "--product-tflops", 600, "--memory-gb-s", 4000, *fitted, *rates,
        )  # fmt: skip
        estimates = {(row["strategy"], row["exchange"]): 1e3 * row["step_seconds"] for row in estimates["rows"]}
        measured = self.json(
            "distributed_benchmark", *common, *timed, "--gpus", self.flags.gpus, "--part", "steps", "--without-alone"
        )
        for row in measured["rows"]:
            ms, estimate = row["median_ms"], estimates[row["strategy"], row["exchange"]]
            ratio = "-" if alone is None else f"{alone / ms:.2f}"
            print(
                f"| {name} B{batch} T{length} | {row['strategy']} | {row['exchange']} "
                f"| {'OOM' if alone is None else f'{alone:.2f}'} | {estimate:.2f} | {ms:.2f} "
                f"| {100 * (estimate / ms - 1):+.1f}% | {ratio} "
                f"| {1e3 * batch * length / ms:,.0f} |",
                flush=True,
            )

    def peer(self):
        print("| model | PyTorch | step (ms) | peak (MiB) | tokens/s a GPU |")
        print("|---|---|---:|---:|---:|", flush=True)
        for name, batch, length, _, strategies in self.configurations():
            peers = [PEERS[strategy.replace("-", " ")] for strategy in strategies]
            with tempfile.TemporaryDirectory() as folder:
                config = os.path.join(LLAMA, "config.json")
                if name in PRESETS:
                    config = os.path.join(folder, "config.json")
                    self.write_preset(config, *PRESETS[name])
                checkpoint = ["--checkpoint"] if self.flags.peer_checkpoint else []
                command = [
                    sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(self.flags.gpus),
                    os.path.join(HERE, "pytorch_ranks.py"), "--config", config, "--strategy", *peers, *checkpoint,
                    "--batch-size", str(batch), "--context-length", str(length), "--steps", str(self.flags.steps),
                ]  # fmt: skip
                note(" ".join(command))
                run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            for row in map(json.loads, run.stdout.splitlines()):
                label = f"| {name} B{batch} T{length} | {row['strategy']}"
                if "status" in row:
                    print(f"{label} | {row['status']} | - | - |", flush=True)
                    continue
                peak, ms = row["peak_bytes"] / 2**20, row["median_ms"]
                print(f"{label} | {ms:.2f} | {peak:,.0f} | {1e3 * batch * length / ms:,.0f} |", flush=True)

    @staticmethod
    def write_preset(path, d, ff, layers, heads):
        config = {
            "hidden_size": d, "intermediate_size": ff, "num_hidden_layers": layers, "num_attention_heads": heads,
            "vocab_size": 10_000, "rope_theta": 10_000.0, "rms_norm_eps": 1e-5,
        }  # fmt: skip
        with open(path, "w") as file:
            json.dump(config, file)

    def training(self):
        """Trains to the end; then trains again, kills all ranks after half of the steps, and resumes with fewer GPUs.
        The losses of both must agree to 1e-3: another number of ranks adds gradients in another order."""
        size, steps, gpus = self.flags.training_size, 100, self.flags.gpus
        fewer = max(count for count in range(1, gpus) if gpus % count == 0)
        with tempfile.TemporaryDirectory(dir=self.flags.folder) as folder:
            saved = os.path.join(folder, "run.safetensors")
            common = [
                self.program("train"), "--size", size, "--precision", "bf16", "--attention", "flash", "--batch-size",
                "1", "--accumulation", str(gpus), "--steps", str(steps), "--evaluate-every", "10", "--sample", "0",
                "--lr", "1e-4", "--data", os.path.join(HERE, "..", "src", "lib.rs"),
            ]  # fmt: skip

            def on(count):  # one rank alone has no strategy
                return ["--gpus", str(count), *(["--strategy", "fully-shard"] if count > 1 else [])]

            whole = self.losses([*common, *on(gpus)])
            kept = [*common, "--checkpoint", saved, "--checkpoint-every", "20"]
            killed = self.losses([*kept, *on(gpus)], kill_after=steps // 2)
            resumed = self.losses([*kept, "--resume", *on(fewer)])
        both = [(step, whole[step], resumed[step]) for step in resumed if step in whole]
        if not both or max(both)[0] < steps:
            raise RuntimeError(f"the resumed run has no loss of step {steps}: {resumed}")
        off = max(abs(a - b) for _, a, b in both)
        print(f"{size}: {gpus} GPUs, killed after step {max(killed)}; {fewer} went on.")
        print(f"Losses of steps {both[0][0]} to {steps} differ from those of the whole run by {off:.1e} at most.")
        if off > 1e-3:
            raise RuntimeError("the resumed losses are others")

    @staticmethod
    def losses(command, kill_after=None):
        """Returns the validation losses by step. After the step `kill_after`, kills the job and all of its ranks."""
        note(" ".join(command))
        job = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        losses, lines, is_killed = {}, [], False
        for line in job.stdout:
            lines.append(line)
            found = re.search(r"step +(\d+).*validation (?:loss )?([\d.]+)", line)
            if found:
                losses[int(found[1])] = float(found[2])
                if kill_after is not None and int(found[1]) >= kill_after:
                    os.killpg(job.pid, signal.SIGKILL)
                    is_killed = True
        if job.wait() != 0 and not is_killed:
            raise RuntimeError("".join(lines[-10:]))
        return losses


def main():
    parts = ["tests", "collectives", "steps", "peer", "training"]
    flags = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    flags.add_argument("--gpus", type=int, required=True)
    flags.add_argument("--parts", nargs="+", choices=parts, default=parts)
    flags.add_argument("--models", nargs="+", choices=sorted({config[0] for config in STEPS}), help="of steps and peer")
    flags.add_argument("--steps", type=int, default=15, help="measured steps")
    flags.add_argument("--peer-checkpoint", action="store_true", help="PyTorch recomputes each block in backward")
    flags.add_argument("--training-size", default="10b", help="preset of the training run")
    flags.add_argument("--folder", help="folder for its checkpoints: 12 bytes a parameter, twice")
    flags.add_argument("--binaries", default="target/release/examples", help="folder of the examples' programs")
    flags.add_argument("--tests", help="program of the distributed tests")
    flags = flags.parse_args()
    run = Run(flags)
    gpu = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True)
    print(f"# {flags.gpus} GPUs of one host, {time.strftime('%Y-%m-%d')}\n\n{gpu.stdout.splitlines()[:1]}")
    for part in flags.parts:
        run.part(part)
    if run.failed:
        sys.exit(f"failed: {', '.join(run.failed)}")


if __name__ == "__main__":
    main()
