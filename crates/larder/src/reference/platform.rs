//! Platforms: operating system, processor architecture, and variant.

use std::fmt;
use std::str::FromStr;
use std::sync::LazyLock;

/// Longest part of a platform, in characters.
const MAX_PART: usize = 32;

/// Systems and architectures that stand alone after `--platform`.
const SYSTEMS: [&str; 4] = ["linux", "windows", "darwin", "freebsd"];
const ARCHITECTURES: [&str; 10] =
    ["amd64", "386", "arm64", "arm", "ppc64le", "s390x", "riscv64", "loong64", "mips64le", "mips64"];

/// An operating system and a processor architecture, as written.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Platform {
    /// `linux`, ...
    pub os: String,
    /// `amd64`, `arm64`, ...
    pub architecture: String,
    /// `v7`, ...; empty if none.
    pub variant: String,
}

impl Platform {
    /// A platform without variant.
    pub fn new(os: &str, architecture: &str) -> Platform {
        Platform { os: os.into(), architecture: architecture.into(), variant: String::new() }
    }

    /// The platform with another architecture and variant.
    #[must_use]
    pub fn with_variant(&self, architecture: &str, variant: &str) -> Platform {
        Platform { os: self.os.clone(), architecture: architecture.into(), variant: variant.into() }
    }

    /// This machine, with the variant of its processor where it matters.
    pub fn host() -> &'static Platform {
        static HOST: LazyLock<Platform> = LazyLock::new(|| {
            let architecture = match std::env::consts::ARCH {
                "x86_64" => "amd64",
                "x86" => "386",
                "aarch64" => "arm64",
                "powerpc64" if cfg!(target_endian = "little") => "ppc64le",
                "loongarch64" => "loong64",
                other => other,
            };
            Platform { variant: host_variant(), ..Platform::new("linux", architecture) }
        });
        &HOST
    }

    /// Parses what a user writes after `--platform`: `OS[/ARCHITECTURE[/VARIANT]]`, with this machine's architecture
    /// where there is none, or an architecture alone, as docker takes it.
    pub fn parse_short(text: &str) -> Result<Platform, PlatformError> {
        if text.contains('/') {
            return text.parse();
        }
        let (os, platform) = (text.to_ascii_lowercase(), Platform::new("linux", text).canonical());
        if SYSTEMS.contains(&&*os) {
            Ok(Platform::new(&os, &Platform::host().architecture))
        } else if ARCHITECTURES.contains(&&*platform.architecture) {
            Ok(platform)
        } else {
            Err(PlatformError(text.to_owned()))
        }
    }

    /// Whether an image for this platform is one for this machine: it names no other system or architecture, and no
    /// other variant than this machine's.
    pub fn is_host(&self) -> bool {
        let (own, host) = (self.canonical(), Platform::host().canonical());
        let any_variant = self.variant.is_empty() || own.variant.is_empty();
        own == host || any_variant && (own.os, own.architecture) == (host.os, host.architecture)
    }

    /// Normalizes spellings as containerd does: builders write `x86_64`, `aarch64`, `arm64` with and without `v8`, and
    /// so on.
    #[must_use]
    pub fn canonical(&self) -> Platform {
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
            ("amd64", "v1") | ("arm64", "v8") => String::new(),
            ("arm", "") => "v7".to_owned(),
            _ => variant,
        };
        Platform { os, architecture, variant }
    }
}

/// `linux/arm64/v8`.
impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = |text: &str| text.chars().filter(|c| !c.is_control()).take(MAX_PART).collect::<String>();
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
            (1..=MAX_PART).contains(&part.len())
                && part.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
        };
        if !parts.iter().all(good) {
            return Err(PlatformError(text.to_owned()));
        }
        let platform = |os: &str, architecture: &str, variant: &str| {
            Platform::new(os, "").with_variant(architecture, variant)
        };
        match parts[..] {
            [os, architecture] => Ok(platform(os, architecture, "")),
            [os, architecture, variant] => Ok(platform(os, architecture, variant)),
            _ => Err(PlatformError(text.to_owned())),
        }
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

    fn platform(text: &str) -> Platform {
        text.parse().expect(text)
    }

    #[test]
    fn texts_that_are_no_platform_are_refused() {
        for text in ["", "linux", "linux/", "linux/amd64/v1/x", "linux/am d64"] {
            assert!(text.parse::<Platform>().is_err(), "{text}");
        }
        assert_eq!(platform("linux/arm/v6").to_string(), "linux/arm/v6");
        assert_eq!(Platform::parse_short("aarch64").unwrap().to_string(), "linux/arm64");
        for text in ["", "li nux", "linux/", "foo", "all"] {
            let error = Platform::parse_short(text).unwrap_err().to_string();
            assert!(error.contains(&format!("{text:?}")), "{error}");
        }
    }

    #[test]
    fn spellings_have_one_canonical_form() {
        for (written, canonical) in [
            ("linux/x86_64", "linux/amd64"),
            ("linux/amd64/v1", "linux/amd64"),
            ("Linux/ARM64/8", "linux/arm64"),
            ("linux/arm", "linux/arm/v7"),
            ("linux/armel", "linux/arm/v6"),
            ("linux/amd64/v3", "linux/amd64/v3"),
        ] {
            assert_eq!(platform(written).canonical().to_string(), canonical);
        }
    }

    #[test]
    fn a_canonical_platform_is_this_machine_exactly_if_the_written_one_is() {
        let host = Platform::host();
        for variant in ["", "v1", "v2", "v3", "v4", "v5", "v8", "v9"] {
            for architecture in ["amd64", "x86_64", "arm64", "arm", &host.architecture] {
                let written = Platform::new("linux", "").with_variant(architecture, variant);
                let again = platform(&written.canonical().to_string());
                assert_eq!(written.is_host(), again.is_host(), "{written}");
                assert_eq!(written.canonical(), again.canonical(), "{written}");
            }
        }
    }

    #[test]
    fn this_machine_is_its_architecture_and_its_own_variant_only() {
        let host = Platform::host();
        assert!(host.is_host() && Platform::new(&host.os, &host.architecture).is_host());
        assert!(Platform::parse_short("linux").unwrap().is_host());
        for other in ["linux/s390x", "windows/amd64", "linux/amd64/v9", "linux/arm/v9"] {
            assert!(!platform(other).is_host(), "{other} on {host}");
        }
    }
}
