//! containerd's `hosts.toml`.
//!
//! ```toml
//! server = "https://registry.example"        # the registry itself, asked last
//!
//! [host."https://mirror.example"]            # asked first; several in the order of the file
//!   capabilities = ["pull", "resolve", "referrers"]    # default: all
//!   ca = "ca.crt"                            # or a list; relative to this file
//!   client = [["client.cert", "client.key"]] # or files that hold both
//!   skip_verify = false
//!   override_path = false                    # the URL's path is all of it: do not append /v2
//!   [host."https://mirror.example".header]
//!     x-team = "shop"
//! ```
//!
//! The keys of a host may also be at the top level, where they apply to the server. Unknown keys are ignored and
//! logged: mostly they are misspelt.

use std::fmt;
use std::path::{Path, PathBuf};

use reqwest::Url;
use reqwest::header::{HeaderName, HeaderValue};
use toml::de::{DeTable, DeValue};

use super::error::HostsError;
use super::files;
use super::host::RegistryHost;

/// The keys of a host. `dial_timeout` is accepted for containerd only: larder has one setting for all hosts.
const OF_HOST: [&str; 7] =
    ["capabilities", "ca", "client", "skip_verify", "override_path", "header", "dial_timeout"];
/// The top-level keys, which include those of a host.
const OF_FILE: [&str; 9] = [
    "server",
    "host",
    "capabilities",
    "ca",
    "client",
    "skip_verify",
    "override_path",
    "header",
    "dial_timeout",
];

/// An unknown key of a `hosts.toml`, which is ignored.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct UnknownKey {
    file: PathBuf,
    /// Counted from 1.
    line: usize,
    /// The key with its tables.
    key: String,
    /// The most similar known key.
    suggestion: Option<&'static str>,
}

impl fmt::Display for UnknownKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: line {}: unknown key {}, ignored", self.file.display(), self.line, self.key)?;
        self.suggestion.map_or(Ok(()), |meant| write!(f, "; did you mean {meant}?"))
    }
}

/// Reads the file, if there is one. `server` is used if the file names none; `report` receives unknown keys.
pub(super) fn read(
    file: &Path,
    server: RegistryHost,
    report: &dyn Fn(UnknownKey),
) -> Result<Option<Vec<RegistryHost>>, HostsError> {
    let text = match files::read_file(file) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(HostsError::Read(error)),
    };
    let text = String::from_utf8(text).map_err(|_| HostsError::Syntax {
        file: file.to_owned(),
        line: 1,
        problem: "not valid UTF-8".into(),
    })?;
    HostsTomlReader { file, text: &text, report }.hosts(server).map(Some)
}

/// The text of a file during parsing.
struct HostsTomlReader<'a> {
    file: &'a Path,
    text: &'a str,
    report: &'a dyn Fn(UnknownKey),
}

/// A value with the name of its key.
type SpannedValue<'a, 't> = &'a toml::Spanned<DeValue<'t>>;

impl HostsTomlReader<'_> {
    fn hosts(&self, mut server: RegistryHost) -> Result<Vec<RegistryHost>, HostsError> {
        let document = DeTable::parse(self.text).map_err(|error| HostsError::Syntax {
            file: self.file.to_owned(),
            line: self.line(error.span().map_or(0, |span| span.start)),
            problem: error.message().to_owned(),
        })?;
        let document = document.get_ref();
        let mut hosts = Vec::new();
        if let Some(value) = document.get("host") {
            let tables = self.table("host", value)?;
            let mut tables: Vec<_> = tables.iter().collect();
            // A TOML table has no order; here the order in the file is the order of the requests.
            tables.sort_by_key(|(name, _)| name.span().start);
            for (name, value) in tables {
                let key = format!("host.{:?}", name.get_ref());
                let table = self.table(&key, value)?;
                let override_path = self.flag(&format!("{key}.override_path"), table.get("override_path"))?;
                let base = self.url(&key, name.get_ref(), name.span().start, override_path)?;
                self.report_unknown(&key, table, &OF_HOST);
                hosts.push(self.host(&key, RegistryHost::new(base), table)?);
            }
        }
        if let Some(value) = document.get("server") {
            let override_path = self.flag("override_path", document.get("override_path"))?;
            let text = self.text("server", value)?;
            if !text.is_empty() {
                let base = self.url("server", text, value.span().start, override_path)?;
                server = RegistryHost { is_registry: true, ..RegistryHost::new(base) };
            }
        }
        self.report_unknown("", document, &OF_FILE);
        hosts.push(self.host("", server, document)?);
        Ok(hosts)
    }

    /// Applies the keys of a table to a host.
    fn host(
        &self,
        path: &str,
        mut host: RegistryHost,
        table: &DeTable<'_>,
    ) -> Result<RegistryHost, HostsError> {
        let key = |name: &str| below(path, name);
        if let Some(value) = table.get("capabilities") {
            self.capabilities(&key("capabilities"), value, &mut host)?;
        }
        // Who says something of TLS means TLS, on loopback too.
        let names_tls = ["skip_verify", "ca", "client"].iter().any(|key| table.contains_key(*key));
        host.plain_fallback &= !names_tls;
        let skip = table.get("skip_verify");
        if skip.is_some() || table.contains_key("ca") {
            host.tls.skip_verify = skip.is_some() && self.flag(&key("skip_verify"), skip)?;
            host.tls.skip_is_implied = false;
        }
        if let Some(value) = table.get("ca") {
            let name = key("ca");
            for path in self.one_or_many(&name, value)? {
                host.tls
                    .authorities
                    .push(files::authority(&self.path(self.text(&name, path)?), &self.named(&name))?);
            }
        }
        if let Some(value) = table.get("client") {
            let name = key("client");
            for item in self.one_or_many(&name, value)? {
                let (certificate, private) = self.client(&name, item)?;
                host.tls.client.push(files::client(&certificate, &private, &self.named(&name))?);
            }
        }
        if let Some(value) = table.get("header") {
            let name = key("header");
            for (field, value) in self.table(&name, value)? {
                self.header(&format!("{name}.{}", field.get_ref()), field.get_ref(), value, &mut host)?;
            }
        }
        Ok(host)
    }

    /// Reads `capabilities`.
    fn capabilities(
        &self,
        key: &str,
        value: SpannedValue<'_, '_>,
        host: &mut RegistryHost,
    ) -> Result<(), HostsError> {
        (host.pull, host.resolve, host.referrers) = (false, false, false);
        for item in self.list(key, value)? {
            match self.text(key, item)?.to_ascii_lowercase().as_str() {
                "pull" => host.pull = true,
                "resolve" => host.resolve = true,
                "referrers" => host.referrers = true,
                "push" => {}
                other => {
                    let problem =
                        format!("unknown capability {other:?}; known are pull, resolve, referrers and push");
                    return Err(self.problem(key, item.span().start, problem));
                }
            }
        }
        Ok(())
    }

    /// Reports the keys of a table that are not in `known`.
    fn report_unknown(&self, path: &str, table: &DeTable<'_>, known: &[&'static str]) {
        for name in table.keys() {
            let text = name.get_ref().as_ref();
            if known.contains(&text) {
                continue;
            }
            (self.report)(UnknownKey {
                file: self.file.to_owned(),
                line: self.line(name.span().start),
                key: below(path, text),
                suggestion: larder::suggestions::nearest(text, known.iter().copied()),
            });
        }
    }

    /// A file with both, or a pair of files.
    fn client(&self, key: &str, item: SpannedValue<'_, '_>) -> Result<(PathBuf, PathBuf), HostsError> {
        if item.get_ref().is_str() {
            let both = self.path(self.text(key, item)?);
            return Ok((both.clone(), both));
        }
        let pair = self.list(key, item)?;
        match pair[..] {
            [certificate] => {
                let both = self.path(self.text(key, certificate)?);
                Ok((both.clone(), both))
            }
            [certificate, private] => {
                Ok((self.path(self.text(key, certificate)?), self.path(self.text(key, private)?)))
            }
            _ => Err(self.problem(key, item.span().start, "expected [certificate, key]".into())),
        }
    }

    fn header(
        &self,
        key: &str,
        field: &str,
        value: SpannedValue<'_, '_>,
        host: &mut RegistryHost,
    ) -> Result<(), HostsError> {
        let at = value.span().start;
        let name = HeaderName::from_bytes(field.as_bytes())
            .map_err(|_| self.problem(key, at, "invalid header name".into()))?;
        for item in self.one_or_many(key, value)? {
            let mut text = HeaderValue::from_str(self.text(key, item)?)
                .map_err(|_| self.problem(key, at, "invalid header value".into()))?;
            // The value may be a token.
            text.set_sensitive(true);
            host.headers.push((name.clone(), text));
        }
        Ok(())
    }

    /// The base URL of a host's API.
    fn url(&self, key: &str, text: &str, at: usize, override_path: bool) -> Result<Url, HostsError> {
        let problem = |problem: String| self.problem(key, at, problem);
        let full = if text.contains("://") { text.to_owned() } else { format!("https://{text}") };
        let mut url = Url::parse(&full).map_err(|error| problem(format!("invalid URL: {error}")))?;
        if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none_or(str::is_empty) {
            return Err(problem("expected http:// or https:// and a host".into()));
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(problem("the URL must not contain credentials".into()));
        }
        url.set_query(None);
        url.set_fragment(None);
        let path = url.path().trim_end_matches('/').to_owned();
        let path = if override_path || path.ends_with("/v2") { path } else { format!("{path}/v2") };
        url.set_path(&path);
        Ok(url)
    }

    fn path(&self, text: &str) -> PathBuf {
        self.file.parent().unwrap_or(Path::new("/")).join(text)
    }

    fn table<'v, 't>(&self, key: &str, value: SpannedValue<'v, 't>) -> Result<&'v DeTable<'t>, HostsError> {
        value.get_ref().as_table().ok_or_else(|| self.expected(key, "a table", value))
    }

    fn text<'v>(&self, key: &str, value: SpannedValue<'v, '_>) -> Result<&'v str, HostsError> {
        value.get_ref().as_str().ok_or_else(|| self.expected(key, "a string", value))
    }

    fn list<'v, 't>(
        &self,
        key: &str,
        value: SpannedValue<'v, 't>,
    ) -> Result<Vec<SpannedValue<'v, 't>>, HostsError> {
        let list = value.get_ref().as_array().ok_or_else(|| self.expected(key, "an array", value))?;
        Ok(list.iter().collect())
    }

    fn one_or_many<'v, 't>(
        &self,
        key: &str,
        value: SpannedValue<'v, 't>,
    ) -> Result<Vec<SpannedValue<'v, 't>>, HostsError> {
        if value.get_ref().is_str() { Ok(vec![value]) } else { self.list(key, value) }
    }

    fn flag(&self, key: &str, value: Option<SpannedValue<'_, '_>>) -> Result<bool, HostsError> {
        value.map_or(Ok(false), |value| {
            value.get_ref().as_bool().ok_or_else(|| self.expected(key, "true or false", value))
        })
    }

    fn expected(&self, key: &str, expected: &str, value: SpannedValue<'_, '_>) -> HostsError {
        let found = value.get_ref().type_str();
        self.problem(key, value.span().start, format!("expected {expected}, found {found}"))
    }

    fn problem(&self, key: &str, at: usize, problem: String) -> HostsError {
        HostsError::Key { file: self.file.to_owned(), line: self.line(at), key: key.to_owned(), problem }
    }

    /// A key with its file, for errors about another file.
    fn named(&self, key: &str) -> String {
        format!("{key} of {}", self.file.display())
    }

    fn line(&self, at: usize) -> usize {
        1 + self.text.bytes().take(at).filter(|byte| *byte == b'\n').count()
    }
}

/// A key of the table at `path`; an empty one is the file itself.
fn below(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}
