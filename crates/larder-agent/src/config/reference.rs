//! The reference page of all settings, made from the table. `docs/configuration.md` is what it prints.

use serde_json::Value;

use super::read::ConfigReader;
use super::settings::{self, ReloadSupport, Setting};
use super::{API_VERSION, Config, KIND};
use crate::environment::DefaultPaths;

/// The page, as Markdown.
pub fn page() -> String {
    let places = DefaultPaths { root: Some("/".into()), socket: Some("/".into()), ..DefaultPaths::default() };
    let Ok(defaults) = ConfigReader::new(&places).finish() else { return String::new() };
    let mut page = intro();
    let mut open = None;
    for setting in settings::all() {
        let section = setting.key.rsplit_once('.').map_or("", |(section, _)| section);
        if open != Some(section) {
            page.push_str(&heading(section));
            open = Some(section);
        }
        page.push_str(&row(setting, &defaults));
    }
    page + LISTS
}

fn intro() -> String {
    format!(
        "\
# Configuration

All settings of larder, with types and defaults, and how the daemon and commands read them.

    larder config --check /etc/larder/config.yaml

<!-- Printed by `larder config --reference`; a test compares. -->

All settings are optional. `larder serve` and every command that works on images read one YAML file: the one of
`--config` (`serve`, `config` and `kube check` only), the one of `LARDER_CONFIG`, or `/etc/larder/config.yaml` if it
exists (as another user than root, `$XDG_CONFIG_HOME/larder/config.yaml`).

```yaml
apiVersion: {API_VERSION}
kind: {KIND}
imageGCHighThresholdPercent: 70
imageGCLowThresholdPercent: 60
backend: unix:///run/containerd/containerd.sock
gc:
  minimumFreeBytes: 10GiB
  keep:
    - name: registry.example/base/*
```

| command | result |
|---|---|
| `larder config` | all effective settings as such a file, each with its origin |
| `larder config --check FILE` | all errors of a file, each with line and key |

**Precedence.** Flags override variables, which override larder's file, kubelet's file (`--kubelet-config`) and the
defaults, in this order. `LARDER_ROOT` is `root` with larder's own store, and overrides `LARDER_BACKEND`, which is
`backend`; neither counts if `--root` or `--backend` is given. Only the image settings of kubelet's file are read; all
others are ignored. `Flag:` in the tables names a flag of `larder serve` and `larder config`; other commands have those in their
`--help`.

**Names and values.** A setting of kubelet has the name, range and error messages of kubelet. Durations have units
(`90s`, `1h30m`); sizes are bytes or have a unit (`500MB`, `10GiB`). `null` means the default. Unknown keys are errors.

**Reload.** On SIGHUP, or if the file changes, the daemon applies the settings marked *live*. A changed setting marked
*restart* is logged and keeps its value until the daemon restarts. A file with errors changes nothing.

Where larder's default differs from kubelet's, the column of defaults names kubelet's; set that value for kubelet's
behaviour.
"
    )
}

fn heading(section: &str) -> String {
    let title = match section {
        "" => "Top-level settings".to_owned(),
        section => format!("`{section}`"),
    };
    format!("\n## {title}\n\n| setting | type | default | reload | description |\n|---|---|---|---|---|\n")
}

fn row(setting: &Setting, defaults: &Config) -> String {
    let default = match setting.default {
        Some(words) => words.to_owned(),
        None => shown(&(setting.show)(defaults)),
    };
    let kubelet = setting.kubelet_default.map(|value| format!("; kubelet: {value}")).unwrap_or_default();
    let reload = match setting.reload {
        ReloadSupport::Live => "live",
        ReloadSupport::Restart => "restart",
    };
    let flag = setting.kubelet_flag.map(|flag| format!(" Flag: `{flag}`.")).unwrap_or_default();
    let (key, form, about) = (setting.key, (setting.codec_name)(), setting.description);
    format!("| `{key}` | {form} | {default}{kubelet} | {reload} | {about}{flag} |\n")
}

fn shown(value: &Value) -> String {
    match value {
        Value::String(text) if text.is_empty() => "empty".into(),
        Value::String(text) => format!("`{text}`"),
        Value::Array(items) if items.is_empty() => "empty".into(),
        Value::Array(items) => items.iter().map(shown).collect::<Vec<_>>().join(", "),
        value => format!("`{value}`"),
    }
}

const LISTS: &str = "
## Items of `gc.keep`

Each is a keep rule with exactly one selector, as in `larder keep`. GC retains the images that it selects.

| key | meaning |
|---|---|
| `name` | images with a name that matches; `*` matches any text, `?` one character |
| `digest` | the image with this image ID, or with a name of this digest |
| `label` | images whose config has this label: `KEY`, or `KEY=VALUE` with a value of up to 1,023 bytes |
| `type` | images of this type: `image`, `model`, `chart`, `wasm`, `signature`, `sbom`, `attestation`, or an artifact type; `*` and `?` as in `name` |
| `repository`, `newest` | the N images of each matching repository that were first seen most recently, whatever their tags |
| `ttl` | limit: only until this long after the last use |
| `budget` | limit: only as many images as fit into this size, the last used first |

## Items of `prefetch`

```yaml
prefetch:
  - image: registry.example/base/app:stable
    interval: 6h
    jitter: 10m
  - image: registry.example/tools:v3
    schedule: \"03:30\"
    lease: 48h
```

| key | meaning |
|---|---|
| `image` | the image name, with `#linux/arm64` for another platform; required |
| `interval` | ensure the image again this long after the last time |
| `schedule` | ensure the image each day at this local time, `\"HH:MM\"`; excludes `interval`. With neither: at start, and when the list changes |
| `jitter` | add a random delay up to this; default 0 |
| `keep` | retain the image while it is on the list; default true |
| `lease` | instead of `keep`, retain the image for this long after each ensure, whether a container uses it or not |
";

#[cfg(test)]
mod tests {
    use super::*;

    /// `LARDER_BLESS=1` writes the page instead.
    #[test]
    fn the_page_in_docs_is_the_one_that_is_printed() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/configuration.md");
        if std::env::var_os("LARDER_BLESS").is_some() {
            fs_err::write(&path, page()).unwrap();
        }
        let in_docs = fs_err::read_to_string(&path).unwrap();
        assert!(in_docs == page(), "outdated: run larder config --reference > docs/configuration.md");
    }
}
