"""Writes attention.json: PyTorch's own attention and its gradients in f64, on inputs that the tests can make
themselves (SplitMix64). It ties the f64 oracle to something not written in this repository.

    pip install torch && python tests/golden/make.py
"""

import json
import pathlib

import torch

MASK64 = (1 << 64) - 1


class Draw:
    """tests/support/draw.rs, number for number."""

    def __init__(self, seed):
        self.state = seed

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK64
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
        return z ^ (z >> 31)

    def uniform(self, *shape):
        count = torch.Size(shape).numel()
        values = [2.0 * ((self.next() >> 40) / (1 << 23) - 1.0) for _ in range(count)]
        return torch.tensor(values, dtype=torch.float64).reshape(shape)


def intervals(kind, n):
    """The keys each row sees, written anew rather than taken from the project."""
    if kind == "causal":
        return [(0, i + 1) for i in range(n)]
    if kind == "full":
        return [(0, n) for _ in range(n)]
    if kind == "window":
        return [(max(0, i - 3), i + 1) for i in range(n)]
    if kind == "documents":
        starts = [0, n // 3, n // 2 + 1, n]
        bounds = lambda i: next((a, b) for a, b in zip(starts, starts[1:]) if a <= i < b)
        return [(bounds(i)[0], i + 1) for i in range(n)]
    raise ValueError(kind)


def case(kind, batch, heads, kv_heads, n, head_dim, seed):
    draw = Draw(seed)
    q = draw.uniform(batch, heads, n, head_dim).requires_grad_()
    k = draw.uniform(batch, kv_heads, n, head_dim).requires_grad_()
    v = draw.uniform(batch, kv_heads, n, head_dim).requires_grad_()
    g = draw.uniform(batch, heads, n, head_dim)
    seen = torch.zeros(n, n, dtype=torch.bool)
    for i, (lo, hi) in enumerate(intervals(kind, n)):
        seen[i, lo:hi] = True
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=heads != kv_heads)
    out.backward(g)
    scores = q @ k.repeat_interleave(heads // kv_heads, 1).transpose(-1, -2) / head_dim**0.5
    lse = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)
    flat = lambda x: x.detach().flatten().tolist()
    return {
        "mask": kind, "batch": batch, "heads": heads, "kv_heads": kv_heads, "len": n, "head_dim": head_dim, "seed": seed,
        "out": flat(out), "lse": flat(lse), "d_query": flat(q.grad), "d_key": flat(k.grad), "d_value": flat(v.grad),
    }


if __name__ == "__main__":
    cases = [case(kind, 1, 4, 2, 11, 4, seed) for seed, kind in enumerate(["causal", "full", "window", "documents"])]
    path = pathlib.Path(__file__).with_name("attention.json")
    path.write_text(json.dumps({"torch": torch.__version__, "cases": cases}, indent=None) + "\n")
    print(path, path.stat().st_size, "bytes")
