#!/usr/bin/env bash
# Makes the features `cuda` and `cpu` build where GitHub cannot be reached.
#
# CubeCL's compiler for them, cubecl-llvm, links LLVM and downloads a bundle of it at build time. This script
# puts Debian's LLVM in the bundle's place: it installs the packages (as root, or by sudo) and leaves an
# llvm-config where the build looks for the bundle's. Run it once; with network access to GitHub you need it not.
set -euo pipefail

version=${LLVM_VERSION:-22}
bundle=${TRACEL_LLVM_BUNDLE:-tracel-llvm-23.1.0-4}
home="${XDG_DATA_HOME:-$HOME/.local/share}/tracel/$bundle"

if ! command -v apt-get >/dev/null; then
    echo "error: this script knows apt-get only; install LLVM $version with Polly and write $home/bin/llvm-config by hand" >&2
    exit 2
fi
sudo=(); [ "$(id -u)" = 0 ] || sudo=(sudo)
packages=("llvm-$version-dev" "libpolly-$version-dev" libzstd-dev zlib1g-dev libxml2-dev)
if ! dpkg -s "${packages[@]}" >/dev/null 2>&1; then
    "${sudo[@]}" apt-get update -q
    "${sudo[@]}" apt-get install -y -q --no-install-recommends "${packages[@]}"
fi

mkdir -p "$home/bin"
config=$(cat <<CONFIG
#!/bin/sh
# Debian names a versioned file of z3 that the linker does not find; -lz3 it does.
/usr/lib/llvm-$version/bin/llvm-config "\$@" | sed 's#[^ ]*libz3\.so[^ ]*#-lz3#g'
CONFIG
)
# Left alone where it is right: cargo would build all that depends on it again.
if [ "$(cat "$home/bin/llvm-config" 2>/dev/null)" != "$config" ]; then
    printf '%s\n' "$config" > "$home/bin/llvm-config"
    chmod +x "$home/bin/llvm-config"
fi
[ -e "$home/.tracel-llvm-installed" ] || touch "$home/.tracel-llvm-installed"
echo "LLVM $("$home/bin/llvm-config" --version) stands in for $bundle at $home"
