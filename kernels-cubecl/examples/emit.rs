//! Writes the CUDA C++ of every kernel for matrix units to a folder, attention's and the matrix product's:
//! `emit FOLDER [HEAD_DIM ...]`. No GPU is needed; `check-ptx.py` says what registers the result takes.
#![allow(clippy::print_stdout, reason = "says what it wrote")]

use distflash_kernels::emit;
use std::path::PathBuf;

fn main() -> std::io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let folder = PathBuf::from(arguments.next().unwrap_or_else(|| "emit".into()));
    let mut head_dims: Vec<usize> = arguments.map(|dim| dim.parse().expect("a head_dim")).collect();
    if head_dims.is_empty() {
        head_dims = vec![64, 80, 96, 128, 256];
    }
    std::fs::create_dir_all(&folder)?;
    let attention = head_dims.into_iter().flat_map(emit::sources);
    for source in attention.chain(emit::product_sources()) {
        let path = folder.join(source.name).with_extension("cu");
        std::fs::write(&path, source.code)?;
        println!("{}", path.display());
    }
    Ok(())
}
