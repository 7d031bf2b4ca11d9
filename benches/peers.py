"""PyTorch's attention beside ours: TFLOP/s of FlashAttention 2 and cuDNN, forward and backward, by event timings.

    python benches/peers.py bf16 64,128 1024,2048,4096,8192 16
"""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def median(run, rounds=11):
    times = []
    for i in range(rounds + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def main(dtype, head_dims, lens, heads):
    print(torch.__version__, torch.cuda.get_device_name(), dtype, f"{heads} heads, batch 1")
    for backend in [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]:
        for d in head_dims:
            for causal in [True, False]:
                for n in lens:
                    draw = lambda: torch.randn(1, heads, n, d, device="cuda", dtype=DTYPES[dtype], requires_grad=True)
                    q, k, v = draw(), draw(), draw()
                    attend = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
                    try:
                        with sdpa_kernel(backend):
                            forward = median(attend)
                            out = attend()
                            g = torch.randn_like(out)
                            backward = median(lambda: torch.autograd.grad(out, (q, k, v), g, retain_graph=True))
                    except RuntimeError as error:
                        print(f"{backend.name} {d} {n}: {str(error).splitlines()[0]}")
                        continue
                    flops = 4.0 * heads * n * n * d / (2 if causal else 1)
                    name = "causal" if causal else "full"
                    print(
                        f"{backend.name:>16} {d:>4} {name:>7} {n:>6} | {forward:9.3f} ms {flops / forward / 1e9:7.1f}"
                        f" | {backward:9.3f} ms {2.5 * flops / backward / 1e9:7.1f}"
                    )


if __name__ == "__main__":
    dtype, head_dims, lens, heads = sys.argv[1:5]
    numbers = lambda text: [int(n) for n in text.split(",")]
    main(dtype, numbers(head_dims), numbers(lens), int(heads))
