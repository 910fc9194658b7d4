//! Bytes that are not those that were promised: damaged on the way, changed, or random.

use larder_store::unpack::{LayerEncoding, UnpackError, UnpackOptions, UnpackThreads};
use larder_testkit::archive::{TarBuilderEntry, seal};
use proptest::prelude::*;

use super::entries;
use crate::support::{UnpackDir, digest, gzip};

#[test]
fn wrong_bytes_are_reported_before_what_they_look_like() {
    let plain = entries([TarBuilderEntry::file("f", vec![b'x'; 100_000])]);
    let sound = gzip(&plain);
    let mut changed = sound.clone();
    let middle = changed.len() / 2;
    changed[middle] ^= 0xff;
    for threads in [UnpackThreads::One, UnpackThreads::Two] {
        let options = UnpackOptions { threads, ..UnpackOptions::default() };
        let (digest, diff_id) = (digest(&sound), digest(&plain));
        let expected = |size| larder_store::unpack::ExpectedLayer {
            digest: Some(&digest),
            size: Some(size),
            diff_id: &diff_id,
        };
        let unpack = |bytes: &[u8], size| {
            UnpackDir::new().unpack_expecting(bytes, &expected(size), &options).unwrap_err()
        };
        let size = sound.len() as u64;
        let error = unpack(&changed, size);
        assert!(matches!(error, UnpackError::Digest { stage: LayerEncoding::Compressed, .. }), "{error:?}");
        assert!(error.is_wrong_bytes());
        let error = unpack(&sound[..middle], size);
        assert!(matches!(error, UnpackError::Size { more: false, .. }), "{error:?}");
        let error = unpack(&[&sound[..], b"more"].concat(), size);
        assert!(matches!(error, UnpackError::Size { more: true, .. }), "{error:?}");
        // A sound archive, but another one than the config names.
        let other = larder_store::unpack::ExpectedLayer { digest: None, size: None, diff_id: &digest };
        let error = UnpackDir::new().unpack_expecting(&sound, &other, &options).unwrap_err();
        assert!(matches!(error, UnpackError::Digest { stage: LayerEncoding::Plain, .. }), "{error:?}");
        assert!(!error.is_wrong_bytes());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn changed_archives_never_panic_or_get_out(
        upper: bool,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), any::<bool>()), 1..8),
        cut in any::<prop::sample::Index>(),
        is_cut: bool,
    ) {
        // Without the large file, so that changes hit headers.
        let mut archive = larder_testkit::archive::edge_case_layers()[usize::from(upper)].clone();
        archive.truncate(60 << 10);
        for (at, byte, header) in &changes {
            let at = at.index(archive.len());
            archive[at] = *byte;
            if *header {
                let start = at / 512 * 512;
                if let Some(block) = archive.get_mut(start..start + 512) {
                    let mut sealed: [u8; 512] = block.try_into().unwrap();
                    seal(&mut sealed);
                    block.copy_from_slice(&sealed);
                }
            }
        }
        if is_cut {
            archive.truncate(cut.index(archive.len()));
        }
        let layer = UnpackDir::new();
        let _ = layer.unpack(&archive);
        layer.assert_contained();
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..3000), start in 0..4usize) {
        let start: &[u8] = [&b""[..], &[0x1f, 0x8b, 8], &[0x28, 0xb5, 0x2f, 0xfd], &[0x50, 0x2a, 0x4d, 0x18]][start];
        let layer = UnpackDir::new();
        let _ = layer.unpack(&[start, &bytes].concat());
        layer.assert_contained();
    }
}
