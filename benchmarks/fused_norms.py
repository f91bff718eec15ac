# ruff: noqa
# fmt: off
"""Run on a CUDA machine: PYTHONPATH=src python benchmarks/fused_norms.py [tests] [train] [cpu] [micro]  (default: all)"""
import os, subprocess, sys, time, traceback
START = time.time()
def say(*a): print(*a, flush=True)
def section(name, f):
    if len(sys.argv) > 1 and name not in sys.argv[1:]:
        return
    say(f"\n=== {name}  [{time.time() - START:.0f} s]")
    try:
        f()
    except BaseException:
        traceback.print_exc(); sys.stdout.flush()
    say(f"=== end {name} [{time.time() - START:.0f} s]")

def tests():
    """Shards of the test ids in parallel processes, because most of the time is compilation."""
    file = "tests/norms/test_fused.py"
    base = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    out = subprocess.run([*base, "--collect-only", file], capture_output=True, text=True, timeout=120)
    ids = [l for l in out.stdout.splitlines() if "::" in l]
    if not ids:
        say(out.stdout[-3000:], out.stderr[-3000:]); return
    n = min(8, os.cpu_count() or 1)
    jobs = [subprocess.Popen([*base, "--tb=short", *ids[i::n]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for i in range(n)]
    jobs.append(subprocess.Popen([*base, "--tb=short", "tests/norms/test_gpu.py", "-k", "bit_for_bit or float64", "tests/_core/test_triton_kernels.py"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    for i, j in enumerate(jobs):
        try:
            text = j.communicate(timeout=240)[0]
        except subprocess.TimeoutExpired:
            j.kill(); text = "TIMEOUT\n" + j.communicate()[0]
        lines = text.splitlines()
        say(f"shard {i}: rc {j.returncode}: {lines[-1] if lines else ''}")
        if j.returncode:
            say("\n".join(lines[-70:]))

import torch

def without_fused():
    import advnorm.norms.routed_norm as r
    original = r.find_kernels
    class Off:
        def __enter__(self): r.find_kernels = lambda *a: None
        def __exit__(self, *a): r.find_kernels = original
    return Off()

def train():
    from contextlib import nullcontext
    from advnorm.bench.norms import bench_norms
    say(f"{'batch':>6} {'prec':>8} {'path':>8} " + " ".join(f"{n:>34}" for n in ("plain", "dual_bn", "dual_affine_bn")))
    for batch, precision in ((512, "bf16"), (128, "bf16"), (512, "float32"), (512, "tf32")):
        for path in ("fused", "slices"):
            with nullcontext() if path == "fused" else without_fused():
                r = bench_norms(["dual_bn", "dual_affine_bn"], precision=precision, batch_size=batch, rounds=20 if precision == "bf16" else 8)
            cells = [f"{1e3 * t['train'].seconds:8.3f} ms {t['train'].ratio:6.3f}x +-{t['train'].spread:5.3f} eval{t['eval'].ratio:5.2f}" for t in r.rows.values()]
            say(f"{batch:>6} {precision:>8} {path:>8} " + " ".join(f"{c:>34}" for c in cells) + f"  [{time.time() - START:.0f} s]")

SHAPES = [(512, 64, 32, 32), (512, 128, 16, 16), (512, 256, 8, 8), (512, 512, 4, 4)]

def cpu():
    """Microseconds of host time for forward + backward of one norm, on a tiny input."""
    from advnorm.norms import make_norm, route
    x = torch.randn(8, 64, 4, 4, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last).requires_grad_()
    g = torch.randn_like(x)
    def run(norm, f):
        for _ in range(30): f()
        best = [1e9, 1e9]
        for _ in range(5):
            torch.cuda.synchronize(); a = time.perf_counter()
            for _ in range(100): f()
            torch.cuda.synchronize(); best[1] = min(best[1], (time.perf_counter() - a) / 100)
            torch.cuda.synchronize(); a = time.perf_counter()
            for _ in range(100): norm(x)
            torch.cuda.synchronize(); best[0] = min(best[0], (time.perf_counter() - a) / 100)
        return f"forward {1e6 * best[0]:6.1f} us, forward+backward {1e6 * best[1]:6.1f} us"
    bn = torch.nn.BatchNorm2d(64, device="cuda")
    def step(norm):
        norm(x).backward(g); x.grad = None
        for p in norm.parameters(): p.grad = None
    say("nn.BatchNorm2d       ", run(bn, lambda: step(bn)))
    for name in ("dual_bn", "dual_affine_bn"):
        norm = make_norm(name, 64, device="cuda")
        with route(norm, {"clean": 4, "adv": 4}):
            say(f"{name:15} fused ", run(norm, lambda: step(norm)))
            with without_fused():
                say(f"{name:15} slices", run(norm, lambda: step(norm)))

def micro():
    """Device time by CUDA graphs; one line per shape and tiling."""
    from triton.testing import do_bench_cudagraph
    from advnorm.norms import fused_kernels as k, make_norm, route
    T = k.Tiling
    tilings = [T(), T(programs=2), T(programs=4), T(stages=4), T(stages=2), T(stages=1, programs=4), T(merged=64),
               T(warps=4, programs=4), T(elements=8192, programs=2), T(elements=2048, programs=4, merged=16, stages=4),
               T(widest=32), T(widest=128), T(elements=8192, widest=128, programs=2)]
    data = {}
    for shape in SHAPES:
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
        data[shape] = x, torch.randn_like(x)
    def us(f, rep=15):
        try:
            return 1e3 * do_bench_cudagraph(f, rep=rep)
        except Exception as e:
            say("   failed:", str(e).splitlines()[0][:200]); return float("nan")
    say("builtin / slices: device time in us, forward and forward+backward; ideal at 4.3 TB/s")
    for shape, (x, g) in data.items():
        leaf = x.detach().requires_grad_()
        bn = torch.nn.BatchNorm2d(shape[1], device="cuda"); dual = make_norm("dual_bn", shape[1], device="cuda")
        def both(norm): 
            return torch.autograd.grad(norm(leaf), [leaf, *norm.parameters()], g)
        row = [us(lambda: bn(leaf)), us(lambda: both(bn))]
        with route(dual, {"clean": 256, "adv": 256}):
            with without_fused():
                row += [us(lambda: dual(leaf)), us(lambda: both(dual))]
            row += [us(lambda: dual(leaf)), us(lambda: both(dual))]
        size = x.numel() * 2
        say(f"{str(shape):20} builtin {row[0]:7.1f} {row[1]:7.1f} | slices {row[2]:7.1f} {row[3]:7.1f} | fused {row[4]:7.1f} {row[5]:7.1f} | ideal {3 * size / 4.3e6:6.1f} {8 * size / 4.3e6:6.1f}")
    say("fused by tiling: forward+backward us per shape (each: moments normalize reduce propagate)")
    w = {s[1]: torch.ones(s[1], device="cuda") for s in SHAPES}
    for banks in ((0, 1), (0, 0)):
        say("banks", banks)
        for t in tilings if banks == (0, 1) else tilings[:2]:
            cells, total = [], 0.0
            for shape, (x, g) in data.items():
                try:
                    C = shape[1]; W = (w[C], w[C])
                    L = k.plan_launch((256, 256), banks, shape[2] * shape[3], C, 2, x.device, t)
                    nb = banks[-1] + 1
                    y = torch.empty_like(x); gx = torch.empty_like(x)
                    buf = torch.empty((nb + L.grid[1], 2, C), device="cuda"); st, part = buf[:nb], buf[nb:]
                    gw = torch.empty((2, C), device="cuda"); gb = torch.empty_like(gw)
                    steps = [lambda: k._run(k._batch_norm_moments, L, x, part, None),
                             lambda: k._run(k._batch_norm_output, L, x, y, part, st, W, W, None, None, None, 1e-5, 0.1, **L.spans),
                             lambda: k._run(k._batch_norm_sums, L, g, x, part, st),
                             lambda: k._run(k._batch_norm_gradient, L, g, x, gx, part, st, W, gw, gb, **L.spans)]
                    for s in steps: s()
                    def chain():
                        for s in steps: s()
                    each = [us(s, 5) for s in steps]
                    whole = us(chain)
                    total += 5 * whole  # ResNet-18 has five norms of each size
                    cells.append(f"{whole:6.1f} ({' '.join(f'{e:.0f}' for e in each)})")
                except Exception as e:
                    cells.append("failed: " + str(e).splitlines()[0][:60])
            say(f"{str(tuple(t)):26} {'  '.join(f'{c:24}' for c in cells)} all 20: {total / 1e3:6.3f} ms [{time.time() - START:.0f} s]")

if __name__ == "__main__":
    say(torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA")
    try:
        import triton; say("triton", triton.__version__)
    except Exception: traceback.print_exc()
    section("tests", tests)
    section("train", train)
    section("cpu", cpu)
    section("micro", micro)
