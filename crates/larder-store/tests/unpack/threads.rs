//! The number of threads changes how fast a layer is unpacked, and nothing else.

use larder_store::unpack::{UnpackOptions, UnpackThreads};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};

use crate::support::UnpackDir;

const ALL: [UnpackThreads; 2] = [UnpackThreads::One, UnpackThreads::Two];

#[test]
fn a_file_that_replaces_a_link_on_the_way_is_in_the_way() {
    for threads in ALL {
        let plain = TarBuilder::new()
            .with(TarBuilderEntry::symlink("link", "."))
            .with(TarBuilderEntry::file("link/link", "a file"))
            .with(TarBuilderEntry::file("link/b", "b"))
            .finish();
        let layer = UnpackDir::new();
        let error = layer
            .unpack_with(&plain, &plain, &UnpackOptions { threads, ..UnpackOptions::default() })
            .unwrap_err();
        assert!(error.to_string().contains("link/b"), "{threads:?}: {error}");
    }
}
