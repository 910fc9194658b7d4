//! How a layer is compressed, by its first bytes.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How a layer's bytes are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DetectedCompression {
    /// gzip, with any number of members.
    Gzip,
    /// zstd, with any number of frames.
    Zstd,
    /// xz, which archives of images may have, and no layer.
    Xz,
    /// bzip2, likewise.
    Bzip2,
    /// Not at all.
    None,
}

impl fmt::Display for DetectedCompression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DetectedCompression::Gzip => "gzip",
            DetectedCompression::Zstd => "zstd",
            DetectedCompression::Xz => "xz",
            DetectedCompression::Bzip2 => "bzip2",
            DetectedCompression::None => "plain",
        })
    }
}

impl DetectedCompression {
    /// Says how a stream that begins with these bytes is compressed. Six bytes are enough.
    pub fn detect(start: &[u8]) -> DetectedCompression {
        match start {
            [0x1f, 0x8b, 0x08, ..] => DetectedCompression::Gzip,
            // The second form begins a frame to be skipped, as seekable zstd layers do.
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => DetectedCompression::Zstd,
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => DetectedCompression::Xz,
            [b'B', b'Z', b'h', b'1'..=b'9', 0x31, 0x41, ..] => DetectedCompression::Bzip2,
            _ => DetectedCompression::None,
        }
    }
}
