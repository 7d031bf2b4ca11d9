#!/usr/bin/env python3
"""Asks NVIDIA's compiler, without a GPU, what registers the kernels for matrix units take.

    cargo run -p distflash-kernels --features emit --example emit -- FOLDER
    python3 kernels-cubecl/check-ptx.py FOLDER

Compiles every FOLDER/*.cu as cubecl-cuda does (NVRTC), then assembles it (ptxas), and fails if a kernel spills
registers to memory or if its products are serialised. The compilers come from PyPI, into ~/.cache, on first use.
"""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "burn-distflash" / "nvidia-cuda-13.0"
PACKAGES = ["nvidia-cuda-nvrtc", "nvidia-cuda-nvcc", "nvidia-cuda-runtime", "nvidia-cuda-cccl", "nvidia-cuda-crt"]
ROOT = CACHE / "nvidia" / "cu13"
# Two registers of the largest tile: a smaller tile would cost more.
ALLOWED = {"matrix_forward_128": 8, "matrix_forward_previous_128": 16}
ARCHITECTURE = os.environ.get("ARCH", "sm_90a")


def install():
    if (ROOT / "bin" / "ptxas").exists():
        return
    packages = [f"{name}==13.0.*" for name in PACKAGES]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", CACHE, *packages], check=True)


def ptx_of(nvrtc, path):
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), path.read_bytes(), None, 0, None, None)
    includes = [ROOT / "include", ROOT / "include" / "cccl"]
    options = [f"--gpu-architecture={ARCHITECTURE}", *(f"--include-path={folder}" for folder in includes)]
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), array)

    def text(kind):
        size = ctypes.c_size_t()
        getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{kind}")(program, buffer)
        return buffer.value

    if status:
        sys.exit(f"{path}: NVRTC error {status}\n{text('ProgramLog').decode()}")
    target = path.with_suffix(".ptx")
    target.write_bytes(text("PTX"))
    return target


def main(folder):
    install()
    ctypes.CDLL(ROOT / "lib" / "libnvrtc-builtins.so.13.0", mode=ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(ROOT / "lib" / "libnvrtc.so.13")
    sources = sorted(Path(folder).glob("*.cu"))
    if not sources:
        sys.exit(f"no kernels in {folder}")
    failed = False
    print(f"{'kernel':<32} {'registers':>9} {'spilled bytes':>13}")
    for source in sources:
        ptx = ptx_of(nvrtc, source)
        command = [ROOT / "bin" / "ptxas", f"-arch={ARCHITECTURE}", "-v", ptx, "-o", ptx.with_suffix(".cubin")]
        run = subprocess.run(command, capture_output=True, text=True)
        said = run.stdout + run.stderr
        if run.returncode:
            sys.exit(f"{ptx}: ptxas failed\n{said}")
        registers = re.search(r"Used (\d+) registers", said).group(1)
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", said)))
        warnings = [line for line in said.splitlines() if "C75" in line]
        print(f"{source.stem:<32} {registers:>9} {spilled:>13}", *warnings)
        failed |= spilled > ALLOWED.get(source.stem, 0) or bool(warnings)
    if failed:
        sys.exit("a kernel spills, or ptxas serialises its products")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "emit")
