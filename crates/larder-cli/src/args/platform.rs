//! The flag for images of other machines.

#![allow(clippy::doc_markdown, reason = "these comments are the text of --help")]

use clap::Args;
use larder::reference::{ImageName, Platform};
use larder_agent::image_name::digits_of_id;

use super::Command;
use crate::failure::Failure;

/// The platform of the images that a command names.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
pub(crate) struct PlatformFlag {
    /// Platform of the images, such as linux/arm64.
    ///
    /// OS[/ARCHITECTURE[/VARIANT]]; a single image for another platform is NAME#OS/ARCHITECTURE. In larder's own store
    /// only. [default: the platform of this machine].
    #[arg(long, value_name = "PLATFORM", value_parser = Platform::parse_short)]
    pub(crate) platform: Option<Platform>,
}

impl PlatformFlag {
    /// The platform, if it is not this machine's.
    fn other(&self) -> Option<&Platform> {
        self.platform.as_ref().filter(|platform| !platform.is_host())
    }

    /// Makes names those of the images for the platform.
    pub(crate) fn apply<'a>(
        &self,
        names: impl IntoIterator<Item = &'a mut ImageName>,
    ) -> Result<(), Failure> {
        let Some(platform) = &self.platform else { return Ok(()) };
        for name in names {
            if name.as_str().contains('#') {
                let given = format!("--platform {platform} and {name} both name a platform");
                return Err(Failure::bad_input(given).hint("leave out one of them"));
            }
            if is_id(name.as_str()) {
                return Err(Failure::bad_input(format!(
                    "--platform {platform}: {name} is an ID, which is one image"
                ))
                .hint("leave out the platform, or write the name of the image"));
            }
            if let Some(other) = self.other() {
                *name = format!("{name}#{}", other.canonical()).into();
            }
        }
        Ok(())
    }
}

/// Whether a text is an ID, as lists print it, and no name.
pub(crate) fn is_id(text: &str) -> bool {
    digits_of_id(text).is_some_and(|digits| text.len() > digits.len() || digits.len() >= SHORT_ID)
}

/// Digits of the IDs that lists print.
const SHORT_ID: usize = 12;

impl Command {
    /// Makes the names of a command those of the images for its `--platform`.
    pub(crate) fn apply_platform(&mut self) -> Result<(), Failure> {
        match self {
            Command::Pull(args) => args.work.platform.apply(&mut args.work.images),
            Command::Complete(args) => args.work.platform.apply(&mut args.work.images),
            Command::Inspect(args) => args.platform.apply(&mut args.images),
            Command::Exists(args) => args.platform.apply([&mut args.image]),
            Command::Rm(args) => args.platform.apply(&mut args.images),
            Command::Save(args) => args.platform.apply(&mut args.images),
            Command::Export(args) => args.platform.apply([&mut args.image]),
            Command::Mount(args) => args.platform.apply(&mut args.image),
            // ensure also reads names in files, and load in archives.
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(platform: &str, name: &str) -> Result<String, String> {
        let flag = PlatformFlag {
            platform: Some(Platform::parse_short(platform).map_err(|error| error.to_string())?),
        };
        let mut name = ImageName::from(name);
        flag.apply([&mut name]).map_err(|failure| failure.to_string())?;
        Ok(name.to_string())
    }

    #[test]
    fn a_name_gets_the_platform_of_another_machine() {
        let host = Platform::host();
        for (platform, name, expected) in [
            ("linux/s390x", "app:1", "app:1#linux/s390x"),
            ("Linux/S390X", "app", "app#linux/s390x"),
            ("linux", "app:1", "app:1"),
            (&host.to_string(), "app:1", "app:1"),
            ("linux/s390x", "abcd", "abcd#linux/s390x"),
        ] {
            assert_eq!(named(platform, name).as_deref(), Ok(expected));
        }
        for (platform, name, problem) in [
            ("linux/s390x", "app#linux/arm64", "both name a platform"),
            ("linux/s390x", "sha256:abcd", "is an ID"),
            ("linux/s390x", "56f4daaa8746", "is an ID"),
            ("linux/s390x/x/y", "app", "invalid platform"),
            ("", "app", "invalid platform"),
        ] {
            let error = named(platform, name).unwrap_err();
            assert!(error.contains(problem), "{error}");
        }
    }
}
