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

<!-- Printed by `larder config --reference`; a test compares. -->

`larder serve`, and every command that works on images, reads one YAML file: the one that `--config` or `LARDER_CONFIG` names, else `/etc/larder/config.yaml` (for
others than root `$XDG_CONFIG_HOME/larder/config.yaml`) if it is there. Every setting may be left out.

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

`larder config` prints all settings in force, each with where it came from; what it prints is such a file.
`larder config --check FILE` tells all mistakes of a file, each with line and key.

**What overrides what.** Defaults, then a file of kubelet's that `--kubelet-config` names, then larder's file, then the
variable `LARDER_BACKEND`, then flags. Of kubelet's file only settings about images count; the others are passed over.

**Names and values** are kubelet's where kubelet has the setting, and so are the checks and their messages. Durations are
written with units (`90s`, `1h30m`), sizes with or without (`500MB`, `10GiB`, bytes). A setting that is null counts as left
out. Keys that larder does not know are refused.

**Reload.** At a reload (SIGHUP, or a changed file) a setting marked *live* is taken over; one marked *restart* keeps its
value until larder is started again, and larder says so. A file with mistakes changes nothing.

Where larder's default is not kubelet's, the column of defaults says so; that value brings kubelet's behaviour back.
"
    )
}

fn heading(section: &str) -> String {
    let title = match section {
        "" => "Settings at the top".to_owned(),
        section => format!("`{section}`"),
    };
    format!("\n## {title}\n\n| setting | type | default | reload | what it does |\n|---|---|---|---|---|\n")
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
    let idle = setting.unsupported_reason.map(|why| format!(" No effect: {why}.")).unwrap_or_default();
    let (key, form, about) = (setting.key, (setting.codec_name)(), setting.description);
    format!("| `{key}` | {form} | {default}{kubelet} | {reload} | {about}{flag}{idle} |\n")
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

Each spares the images that it selects, in exactly one way, as `larder keep` does.

| key | meaning |
|---|---|
| `name` | images with a name like this; `*` stands for any text, `?` for one character |
| `digest` | the image with this id, or with a name of this digest |
| `label` | images whose config has this label: `KEY` or `KEY=VALUE` |
| `repository`, `newest` | the newest so many images of each repository like this |
| `ttl` | only for so long after their last use |
| `budget` | only as many as fit into this size, the last used first |

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
| `image` | its name; needed |
| `interval` | it is made present again so long after the last time |
| `schedule` | it is made present again each day at this time of the node's clock, `\"HH:MM\"`; not with `interval`. With neither: when larder starts, and when the list changes |
| `jitter` | up to so much later, at random; default 0 |
| `keep` | whether it is kept while it is on the list; default true |
| `lease` | instead, it is spared from collection for so long each time |
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
        assert!(in_docs == page(), "larder config --reference > docs/configuration.md brings it up to date");
    }
}
