//! What the kernel allows this process.

use rustix::process::{DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit};

/// Takes as many open files as may be had without asking anybody: shells and services start programs with the 1,024 that
/// `select` knows, which is few for a daemon with many connections and layers.
pub(crate) fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if limit != raised
        && let Err(error) = setrlimit(Resource::Nofile, raised)
    {
        tracing::debug!(%error, "the limit of open files stays as it is");
    }
}

/// Keeps the memory of this process, which holds passwords and tokens, out of core files, and from debuggers of others than
/// root.
pub(crate) fn forbid_core_files() {
    if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        tracing::warn!("a core file of larder would hold passwords, and cannot be forbidden: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_becomes_the_hard_one() {
        let maximum = getrlimit(Resource::Nofile).maximum;
        setrlimit(Resource::Nofile, Rlimit { current: Some(200), maximum }).unwrap();
        raise_open_files();
        assert_eq!(getrlimit(Resource::Nofile), Rlimit { current: maximum, maximum });
    }
}
