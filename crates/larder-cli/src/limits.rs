//! Resource limits of this process.

use rustix::process::{DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit};

/// Raises the soft limit of open files to the hard limit. Shells and services start programs with a soft limit of 1,024
/// for `select`, which is too low for a daemon with many connections and layers.
pub(crate) fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if limit != raised
        && let Err(error) = setrlimit(Resource::Nofile, raised)
    {
        tracing::debug!(%error, "cannot raise the limit of open files");
    }
}

/// Disables core dumps, and debuggers of users other than root: the memory of this process contains passwords and
/// tokens.
pub(crate) fn forbid_core_files() {
    if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        tracing::warn!("cannot disable core dumps, which may contain passwords: {error}");
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
