//! The choice of a platform: which ones a machine can run, best first.

use larder::reference::Platform;
use serde::Deserialize;

use super::bounded;

/// A platform as documents have it. Windows' versions and features are not read.
#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct WrittenPlatform {
    #[serde(default, deserialize_with = "bounded::or_default")]
    os: String,
    #[serde(default, deserialize_with = "bounded::or_default")]
    architecture: String,
    #[serde(default, deserialize_with = "bounded::or_default")]
    variant: String,
}

impl From<WrittenPlatform> for Platform {
    fn from(written: WrittenPlatform) -> Platform {
        let WrittenPlatform { os, architecture, variant } = written;
        Platform { os, architecture, variant }
    }
}

/// The platforms that a machine can run, best first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlatformMatcher {
    wanted: Platform,
    /// Canonical forms, best first.
    accepted: Vec<Platform>,
    /// Whether a caller requested this platform.
    is_requested: bool,
}

impl PlatformMatcher {
    /// The platforms that this machine can run.
    pub fn host() -> PlatformMatcher {
        PlatformMatcher::for_platform(Platform::host())
    }

    /// The platforms that a machine of this platform can run: its own, then compatible ones, older variants
    /// last.
    pub fn for_platform(platform: &Platform) -> PlatformMatcher {
        let Platform { architecture, variant, .. } = platform.canonical();
        let number = variant.strip_prefix('v').and_then(|rest| rest.split('.').next()?.parse::<u8>().ok());
        let down = |architecture: &'static str, from: u8, to: u8| {
            (to..=from).rev().map(move |number| (architecture, format!("v{number}")))
        };
        let mut also: Vec<(&str, String)> = Vec::new();
        match (architecture.as_str(), number) {
            ("amd64", number) => {
                also.extend(down("amd64", number.unwrap_or(1).min(4), 1));
                also.push(("386", String::new()));
            }
            ("arm64", number) => {
                also.extend(down("arm64", number.unwrap_or(8).min(9), 8));
                also.extend(down("arm", 8, 5));
            }
            ("arm", number) => also.extend(down("arm", number.unwrap_or(7).min(8), 5)),
            _ => {}
        }
        let mut accepted = vec![platform.canonical()];
        for (architecture, variant) in also {
            let canonical = platform.with_variant(architecture, &variant).canonical();
            if !accepted.contains(&canonical) {
                accepted.push(canonical);
            }
        }
        PlatformMatcher { wanted: platform.clone(), accepted, is_requested: false }
    }

    /// The requested platform, or an older variant of it; of another architecture nothing, even if a machine of this
    /// platform can run it.
    pub fn requested(platform: &Platform) -> PlatformMatcher {
        let mut matcher = PlatformMatcher::for_platform(platform);
        matcher.is_requested = true;
        let architecture = platform.canonical().architecture;
        matcher.accepted.retain(|accepted| accepted.architecture == architecture);
        matcher
    }

    /// Whether a caller requested this platform: an image for another one must not be taken for it.
    pub fn is_requested(&self) -> bool {
        self.is_requested
    }

    /// The rank of an offer, 0 being best; `None` if it cannot be run.
    pub fn rank(&self, offered: &Platform) -> Option<usize> {
        let offered = offered.canonical();
        self.accepted.iter().position(|accepted| *accepted == offered)
    }

    /// The requested platform.
    pub fn wanted(&self) -> &Platform {
        &self.wanted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Orders the platforms of `offered` that a machine can run, best first.
    fn order(machine: &str, offered: &[&'static str]) -> Vec<&'static str> {
        let matcher = PlatformMatcher::for_platform(&machine.parse().unwrap());
        let mut taken: Vec<_> =
            offered.iter().filter_map(|text| Some((matcher.rank(&text.parse().unwrap())?, *text))).collect();
        taken.sort_by_key(|(rank, _)| *rank);
        taken.into_iter().map(|(_, text)| text).collect()
    }

    #[test]
    fn machines_take_their_own_variant_first_and_older_ones_after_it() {
        assert_eq!(
            order(
                "linux/amd64/v3",
                &["linux/386", "linux/amd64", "linux/amd64/v4", "linux/amd64/v3", "linux/arm64"]
            ),
            ["linux/amd64/v3", "linux/amd64", "linux/386"]
        );
        assert_eq!(
            order("linux/arm/v7", &["linux/arm/v5", "linux/arm/v8", "linux/arm/v6", "linux/arm/v7"]),
            ["linux/arm/v7", "linux/arm/v6", "linux/arm/v5"]
        );
        assert_eq!(
            order("linux/arm64", &["linux/arm/v7", "linux/arm64/v8", "linux/arm64/v9", "linux/amd64"]),
            ["linux/arm64/v8", "linux/arm/v7"]
        );
        assert_eq!(order("linux/riscv64", &["linux/riscv64", "linux/amd64"]), ["linux/riscv64"]);
    }

    #[test]
    fn spellings_of_one_platform_are_equal() {
        for (machine, offered) in [
            ("linux/amd64", "linux/x86_64"),
            ("linux/arm64", "linux/aarch64"),
            ("linux/arm64/v8", "linux/arm64"),
            ("linux/arm64", "Linux/ARM64/8"),
            ("linux/arm/v7", "linux/armhf"),
            ("linux/arm", "linux/arm/v7"),
            ("linux/amd64", "linux/amd64/v1"),
        ] {
            let matcher = PlatformMatcher::for_platform(&machine.parse().unwrap());
            assert_eq!(matcher.rank(&offered.parse().unwrap()), Some(0), "{machine} {offered}");
        }
    }

    #[test]
    fn this_machine_takes_what_is_built_for_it_without_a_variant() {
        let host = Platform::host();
        let plain = Platform::new(&host.os, &host.architecture);
        assert!(PlatformMatcher::host().rank(&plain).is_some(), "{host}");
    }
}
