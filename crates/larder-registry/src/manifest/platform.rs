//! Platforms: which ones a machine can run, best first.

use std::fmt;
use std::str::FromStr;

use serde::Deserialize;

use super::bounded;
use super::limits::MAX_ANNOTATIONS;

/// An operating system and a processor architecture.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Deserialize)]
pub struct Platform {
    /// `linux`, ...
    #[serde(default, deserialize_with = "bounded::or_default")]
    pub os: String,
    /// `amd64`, `arm64`, ...
    #[serde(default, deserialize_with = "bounded::or_default")]
    pub architecture: String,
    /// `v7`, ...; empty if none.
    #[serde(default, deserialize_with = "bounded::or_default")]
    pub variant: String,
    /// Version of the operating system; Windows only.
    #[serde(default, rename = "os.version", deserialize_with = "bounded::or_default")]
    pub os_version: String,
    /// Required features of the operating system; Windows only.
    #[serde(default, rename = "os.features", deserialize_with = "bounded::list::<MAX_ANNOTATIONS, _, _>")]
    pub os_features: Vec<String>,
}

impl Platform {
    /// A platform without variant.
    pub fn new(os: &str, architecture: &str) -> Platform {
        Platform { os: os.into(), architecture: architecture.into(), ..Platform::default() }
    }

    fn with_variant(&self, architecture: &str, variant: &str) -> Platform {
        Platform {
            os: self.os.clone(),
            architecture: architecture.into(),
            variant: variant.into(),
            ..Platform::default()
        }
    }

    /// This machine, with the variant of its processor where it matters.
    pub fn host() -> Platform {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "x86" => "386",
            "aarch64" => "arm64",
            "powerpc64" if cfg!(target_endian = "little") => "ppc64le",
            "loongarch64" => "loong64",
            other => other,
        };
        Platform::new("linux", architecture).with_variant(architecture, &host_variant())
    }

    /// Normalizes spellings: builders write `x86_64`, `aarch64`, `arm64` with and without `v8`, and so on.
    fn canonical(&self) -> (String, String, String) {
        let lower = |text: &str| text.to_ascii_lowercase();
        let (os, architecture, mut variant) =
            (lower(&self.os), lower(&self.architecture), lower(&self.variant));
        let os = if os == "macos" { "darwin".to_owned() } else { os };
        let architecture = match architecture.as_str() {
            "x86_64" | "x86-64" => "amd64",
            "i386" | "i686" => "386",
            "aarch64" => "arm64",
            "armhf" => {
                variant = "v7".into();
                "arm"
            }
            "armel" => {
                variant = "v6".into();
                "arm"
            }
            other => other,
        }
        .to_owned();
        if variant.starts_with(|first: char| first.is_ascii_digit()) {
            variant.insert(0, 'v');
        }
        let variant = match (architecture.as_str(), variant.as_str()) {
            ("amd64", "") => "v1".to_owned(),
            ("arm64", "") => "v8".to_owned(),
            ("arm", "") => "v7".to_owned(),
            _ => variant,
        };
        (os, architecture, variant)
    }
}

/// `linux/arm64/v8`.
impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = |text: &str| text.chars().filter(|c| !c.is_control()).take(32).collect::<String>();
        write!(f, "{}/{}", part(&self.os), part(&self.architecture))?;
        if !self.variant.is_empty() {
            write!(f, "/{}", part(&self.variant))?;
        }
        Ok(())
    }
}

/// A malformed platform.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid platform {0:?}: expected OS/ARCHITECTURE[/VARIANT], such as linux/arm64")]
pub struct PlatformError(String);

impl FromStr for Platform {
    type Err = PlatformError;

    fn from_str(text: &str) -> Result<Self, PlatformError> {
        let parts: Vec<&str> = text.split('/').collect();
        let good = |part: &&str| {
            !part.is_empty()
                && part.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
        };
        if !parts.iter().all(good) {
            return Err(PlatformError(text.to_owned()));
        }
        let platform = |os: &str, architecture: &str, variant: &str| Platform {
            variant: variant.into(),
            ..Platform::new(os, architecture)
        };
        match parts[..] {
            [os, architecture] => Ok(platform(os, architecture, "")),
            [os, architecture, variant] => Ok(platform(os, architecture, variant)),
            _ => Err(PlatformError(text.to_owned())),
        }
    }
}

/// The platforms that a machine can run, best first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlatformMatcher {
    wanted: Platform,
    /// Canonical forms, best first.
    accepted: Vec<(String, String, String)>,
}

impl PlatformMatcher {
    /// The platforms that this machine can run.
    pub fn host() -> PlatformMatcher {
        PlatformMatcher::for_platform(&Platform::host())
    }

    /// The platforms that a machine of this platform can run: its own, then compatible ones, older variants
    /// last.
    pub fn for_platform(platform: &Platform) -> PlatformMatcher {
        let (_, architecture, variant) = platform.canonical();
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
        PlatformMatcher { wanted: platform.clone(), accepted }
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

#[cfg(target_arch = "x86_64")]
fn host_variant() -> String {
    use std::arch::is_x86_feature_detected as has;
    let v2 = has!("sse3")
        && has!("ssse3")
        && has!("sse4.1")
        && has!("sse4.2")
        && has!("popcnt")
        && has!("cmpxchg16b");
    let v3 = v2
        && has!("avx2")
        && has!("bmi1")
        && has!("bmi2")
        && has!("f16c")
        && has!("fma")
        && has!("lzcnt")
        && has!("movbe");
    let v4 =
        v3 && has!("avx512f") && has!("avx512bw") && has!("avx512cd") && has!("avx512dq") && has!("avx512vl");
    match (v4, v3, v2) {
        (true, ..) => "v4".into(),
        (_, true, _) => "v3".into(),
        (.., true) => "v2".into(),
        _ => String::new(),
    }
}

#[cfg(target_arch = "aarch64")]
fn host_variant() -> String {
    "v8".into()
}

#[cfg(target_arch = "arm")]
fn host_variant() -> String {
    let cpu = fs_err::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = cpu.lines().find(|line| line.starts_with("CPU architecture"));
    let number = line.and_then(|line| line.split(':').nth(1)?.trim().parse::<u8>().ok());
    format!("v{}", number.unwrap_or(7).clamp(5, 8))
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "arm")))]
fn host_variant() -> String {
    String::new()
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

    #[test]
    fn texts_that_are_no_platform_are_refused() {
        for text in ["", "linux", "linux/", "linux/amd64/v1/x", "linux/am d64"] {
            assert!(text.parse::<Platform>().is_err(), "{text}");
        }
        assert_eq!("linux/arm/v6".parse::<Platform>().unwrap().to_string(), "linux/arm/v6");
    }
}
