//! Reads a file with settings: bounded, regular, UTF-8.

use std::io::{self, Read as _};
use std::path::Path;

use crate::manifest::InputProblem;

/// The largest file that is read, in bytes: 1 MiB. Real ones have a few KiB.
const MAX_BYTES: u64 = 1 << 20;

/// The text of a file; `None` if there is none and none is required.
pub(super) fn read(path: &Path, required: bool) -> Result<Option<String>, InputProblem> {
    let bytes = match bounded(path) {
        Err(error) if is_absent(&error) && !required => return Ok(None),
        bytes => bytes.map_err(|error| unreadable(&error))?,
    };
    match String::from_utf8(bytes) {
        Ok(text) => Ok(Some(text)),
        Err(error) => {
            let good = &error.as_bytes()[..error.utf8_error().valid_up_to()];
            let line = good.split(|byte| *byte == b'\n').count();
            Err(InputProblem::new("not valid UTF-8").at_line(line).hint("save the file as UTF-8"))
        }
    }
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

fn bounded(path: &Path) -> io::Result<Vec<u8>> {
    let found = fs_err::metadata(path)?;
    if found.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if !found.is_file() {
        // Reading a pipe could block forever, at each reload.
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut bytes = Vec::new();
    fs_err::File::open(path)?.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    Ok(bytes)
}

fn unreadable(error: &io::Error) -> InputProblem {
    match error.kind() {
        _ if is_absent(error) => InputProblem::new("file not found")
            .hint("create it, or leave out the flag or variable that names it: the default file is optional"),
        io::ErrorKind::PermissionDenied => {
            InputProblem::new("permission denied").hint("make it readable for the user of larder")
        }
        io::ErrorKind::IsADirectory => InputProblem::new("is a directory").hint("name the file in it"),
        io::ErrorKind::InvalidInput => InputProblem::new("not a regular file")
            .hint("larder reads it at each reload; write it to a regular file"),
        io::ErrorKind::FileTooLarge => InputProblem::new("larger than the limit of 1 MiB"),
        _ => InputProblem::new(error.to_string()),
    }
}
