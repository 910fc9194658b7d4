//! How a layer is compressed, by its first bytes.

use std::fmt;

use super::UnpackError;

/// How a layer's bytes are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DetectedCompression {
    /// gzip, with any number of members.
    Gzip,
    /// zstd, with any number of frames.
    Zstd,
    /// Not at all.
    None,
}

impl fmt::Display for DetectedCompression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DetectedCompression::Gzip => "gzip",
            DetectedCompression::Zstd => "zstd",
            DetectedCompression::None => "plain",
        })
    }
}

impl DetectedCompression {
    /// Says how a stream that begins with these bytes is compressed. Six bytes are enough.
    pub fn detect(start: &[u8]) -> Result<DetectedCompression, UnpackError> {
        match start {
            [0x1f, 0x8b, 0x08, ..] => Ok(DetectedCompression::Gzip),
            // The second form begins a frame to be skipped, as seekable zstd layers do.
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => {
                Ok(DetectedCompression::Zstd)
            }
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Err(UnpackError::ForeignCompression("xz")),
            [b'B', b'Z', b'h', b'1'..=b'9', 0x31, 0x41, ..] => Err(UnpackError::ForeignCompression("bzip2")),
            _ => Ok(DetectedCompression::None),
        }
    }
}
