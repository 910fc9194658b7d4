//! Options of a check.

/// How to check a store.
#[derive(Debug, Clone, Copy)]
pub struct FsckOptions {
    /// Read every byte of every layer. When false only sizes and records are compared.
    pub contents: bool,
    /// Repair what can be repaired.
    pub repair: bool,
    /// Layers that are checked at once; at least 1.
    pub threads: usize,
}

impl Default for FsckOptions {
    /// Everything is read, nothing is changed, on all cores up to four.
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get().min(4));
        FsckOptions { contents: true, repair: false, threads }
    }
}
