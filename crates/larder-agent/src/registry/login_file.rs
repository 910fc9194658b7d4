//! The logins in docker's `config.json`: changes one entry and preserves the rest.

use std::env;
use std::fs::{File, Permissions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, fchown};
use std::path::{Path, PathBuf};

use fs_err::os::unix::fs::OpenOptionsExt as _;
use larder::credentials::helpers::{HelperNames, HelperRequest};
use larder::credentials::{
    MAX_CONFIG_BYTES, Secret, TokenPolicy, decode_auth, encode_auth, parse_config_json,
};
use larder::hint::Hint;
use rustix::fs::{FlockOperation, flock};
use serde::Serialize as _;
use serde_json::ser::{PrettyFormatter, Serializer};
use serde_json::{Map, Value, json};
use zeroize::{Zeroize as _, Zeroizing};

use super::login_registry::LoginRegistry;
use crate::error::Error;

const AUTHS: &str = "auths";
/// Mode bits for users who are neither the owner nor in the group.
const OTHERS: u32 = 0o007;

/// The file.
pub struct DockerLoginFile {
    path: PathBuf,
}

/// The content of the file, wiped on drop.
pub struct LoginDocument {
    document: Value,
    helpers: HelperNames,
}

/// Excludes other larder processes from writing the file.
pub struct LoginFileLock(#[expect(dead_code, reason = "dropping it releases the lock")] File);

impl DockerLoginFile {
    /// The file that was named, else docker's usual one.
    pub fn named_or_usual(named: Option<&Path>) -> Result<DockerLoginFile, Error> {
        let dir = |variable: &str| env::var_os(variable).filter(|value| !value.is_empty());
        let usual = || {
            let docker = dir("DOCKER_CONFIG").map(PathBuf::from);
            let home = || dir("HOME").map(|home| PathBuf::from(home).join(".docker"));
            docker.or_else(home).map(|dir| dir.join("config.json"))
        };
        let path = named.map(Path::to_owned).or_else(usual).ok_or_else(|| {
            Error::bad_input("no file for the credentials: neither DOCKER_CONFIG nor HOME is set")
                .hint(Hint::from("use ").setting("authfile", "FILE"))
        })?;
        // A symbolic link is kept, and its target is replaced.
        Ok(DockerLoginFile { path: fs_err::canonicalize(&path).unwrap_or(path) })
    }

    /// Its path, after symbolic links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the file; empty if it does not exist.
    pub fn read(&self) -> Result<LoginDocument, Error> {
        let text = self.text().map_err(|error| Error::bad_input(error.to_string()))?;
        let broken = |problem: String| {
            Error::bad_input(format!("{}: {problem}", self.path.display())).hint(
                Hint::from("fix the file, or use another with ")
                    .setting("authfile", "FILE")
                    .text("; wrote nothing"),
            )
        };
        let config = parse_config_json(text.as_bytes(), TokenPolicy::Keep)
            .map_err(|error| broken(error.to_string()))?;
        let document: Value = serde_json::from_str(&text).map_err(|error| broken(error.to_string()))?;
        let document = if document.is_null() { Value::Object(Map::new()) } else { document };
        Ok(LoginDocument { document, helpers: HelperNames::from_config(&config) })
    }

    fn text(&self) -> io::Result<Zeroizing<String>> {
        let mut text = Zeroizing::new(String::new());
        match fs_err::File::open(&self.path) {
            Ok(file) => {
                if !file.metadata()?.is_file() {
                    return Err(io::Error::other(format!("{}: not a file", self.path.display())));
                }
                let size = file.metadata()?.len();
                text.reserve_exact(usize::try_from(size).unwrap_or_default().min(1 << 22) + 1);
                file.take(MAX_CONFIG_BYTES + 1).read_to_string(&mut text)?;
                if text.len() as u64 > MAX_CONFIG_BYTES {
                    return Err(io::Error::other(format!("{}: too large", self.path.display())));
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => text.push_str("{}"),
            Err(error) => return Err(error),
        }
        if text.trim().is_empty() {
            text.push_str("{}");
        }
        Ok(text)
    }

    /// Waits until no other larder process writes the file, and creates its directory if missing.
    pub fn lock(&self) -> Result<LoginFileLock, Error> {
        let dir = self.dir();
        let taken = || {
            if !dir.is_dir() {
                fs_err::create_dir_all(dir)?;
                fs_err::set_permissions(dir, Permissions::from_mode(0o700))?;
            }
            let dir = fs_err::File::open(dir)?.into_parts().0;
            flock(&dir, FlockOperation::LockExclusive)?;
            // A file left by a killed process has all credentials.
            let _ = fs_err::remove_file(self.new_path());
            io::Result::Ok(LoginFileLock(dir))
        };
        taken().map_err(|error| self.unwritten(&error))
    }

    /// Replaces the file atomically. A new file is readable by its owner only; an existing one keeps owner and group,
    /// and its mode unless all users have access.
    pub fn write(&self, logins: &LoginDocument, _lock: &LoginFileLock) -> Result<(), Error> {
        let text = logins.text().map_err(|error| self.unwritten(&error))?;
        let new = self.new_path();
        let written = || {
            let mut file = fs_err::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
            self.give_to_owner(file.file())?;
            file.write_all(&text)?;
            file.sync_all()?;
            fs_err::rename(&new, &self.path)?;
            fs_err::File::open(self.dir())?.sync_all()
        };
        written().map_err(|error| {
            let _ = fs_err::remove_file(&new);
            self.unwritten(&error)
        })
    }

    /// Gives a new file the owner of the old one, and at most its mode.
    fn give_to_owner(&self, new: &File) -> io::Result<()> {
        let old = match fs_err::metadata(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            old => old?,
        };
        let found = new.metadata()?;
        let owner = (old.uid() != found.uid()).then_some(old.uid());
        let group = (old.gid() != found.gid()).then_some(old.gid());
        // A file that all users can read was not opened to the group on purpose.
        let is_public = old.mode() & OTHERS != 0;
        let mut kept = old.mode() & if is_public { 0o600 } else { 0o660 };
        match fchown(new, owner, group) {
            // A user need not be in the file's group, which then has no rights either.
            Err(_) if owner.is_none() => kept &= 0o600,
            given => given?,
        }
        new.set_permissions(Permissions::from_mode(kept))
    }

    /// The file for new content. Its name is fixed, so that the next lock removes a leftover.
    fn new_path(&self) -> PathBuf {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        self.dir().join(format!(".{name}.new"))
    }

    fn dir(&self) -> &Path {
        let dir = self.path.parent().unwrap_or(Path::new("."));
        if dir.as_os_str().is_empty() { Path::new(".") } else { dir }
    }

    fn unwritten(&self, error: &io::Error) -> Error {
        Error::failed(format!("cannot write {}: {error}", self.path.display()))
            .hint(Hint::from("run as its owner, or use another file with ").setting("authfile", "FILE"))
    }
}

impl LoginDocument {
    /// The helper that keeps the credentials of this registry.
    pub fn helper(&self, registry: &LoginRegistry) -> Option<HelperRequest> {
        self.helpers.request_for(registry.host())
    }

    /// The user that is logged in, as far as the file itself says.
    pub fn user(&self, registry: &LoginRegistry) -> Option<String> {
        let entry = self.document.get(AUTHS)?.get(registry.key())?;
        decode_auth(entry.get("auth")?.as_str()?).ok().map(|(user, _)| user).filter(|user| !user.is_empty())
    }

    /// Notes a login; `None` notes that a helper has it.
    pub fn set(&mut self, registry: &LoginRegistry, login: Option<(&str, &Secret)>) {
        let entry = match login {
            Some((user, password)) => json!({"auth": encode_auth(user, password).reveal()}),
            None => json!({}),
        };
        let auths = self.auths();
        for mut old in registry.keys().filter_map(|key| auths.remove(&key)) {
            wipe(&mut old);
        }
        auths.insert(registry.key().to_owned(), entry);
    }

    /// Takes a login out; says whether there was one.
    pub fn remove(&mut self, registry: &LoginRegistry) -> bool {
        let auths = self.auths();
        let gone: Vec<_> = registry.keys().filter_map(|key| auths.remove(&key)).collect();
        let found = !gone.is_empty();
        for mut old in gone {
            wipe(&mut old);
        }
        found
    }

    /// Returns the logins: a parsed docker config has an object there, or nothing.
    fn auths(&mut self) -> &mut Map<String, Value> {
        if !self.document.is_object() {
            self.document = Value::Object(Map::new());
        }
        let auths = &mut self.document[AUTHS];
        if !auths.is_object() {
            *auths = Value::Object(Map::new());
        }
        match auths {
            Value::Object(auths) => auths,
            _ => unreachable!("it was just made one"),
        }
    }

    /// As docker writes it, with tabs.
    fn text(&self) -> io::Result<Zeroizing<Vec<u8>>> {
        let mut size = 0;
        measure(&self.document, &mut size);
        // Sized up front: a growing text leaves copies in memory that are not wiped.
        let mut text = Zeroizing::new(Vec::with_capacity(size));
        let mut writer = Serializer::with_formatter(&mut *text, PrettyFormatter::with_indent(b"\t"));
        self.document.serialize(&mut writer)?;
        text.push(b'\n');
        Ok(text)
    }
}

impl Drop for LoginDocument {
    fn drop(&mut self) {
        wipe(&mut self.document);
    }
}

fn wipe(value: &mut Value) {
    match value {
        Value::String(text) => text.zeroize(),
        Value::Array(values) => values.iter_mut().for_each(wipe),
        Value::Object(fields) => fields.values_mut().for_each(wipe),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// More than its text has bytes, indented.
fn measure(value: &Value, size: &mut usize) {
    *size += 64;
    match value {
        Value::String(text) => *size += 6 * text.len(),
        Value::Array(values) => values.iter().for_each(|value| measure(value, size)),
        Value::Object(fields) => fields.iter().for_each(|(key, value)| {
            *size += 6 * key.len();
            measure(value, size);
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(before: &str, change: impl FnOnce(&mut LoginDocument)) -> String {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        fs_err::write(&path, before).unwrap();
        let file = DockerLoginFile::named_or_usual(Some(&path)).unwrap();
        let mut logins = file.read().unwrap();
        change(&mut logins);
        file.write(&logins, &file.lock().unwrap()).unwrap();
        assert_eq!(fs_err::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs_err::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left");
        fs_err::read_to_string(&path).unwrap()
    }

    #[test]
    fn only_the_given_entry_changes() {
        let before = r#"{"psFormat": "x\ty", "auths": {"a.example": {"auth": "Yjpj", "email": "e"}, "https://r.example/v1/": {"auth": "b2xkOm9sZA=="}}, "n": 12345678901234567890}"#;
        let registry = LoginRegistry::parse("r.example").unwrap();
        let after = written(before, |logins| logins.set(&registry, Some(("bob", &Secret::new("p:1")))));
        let after: Value = serde_json::from_str(&after).unwrap();
        let expected = json!({
            "psFormat": "x\ty", "n": 12_345_678_901_234_567_890_u64,
            "auths": {"a.example": {"auth": "Yjpj", "email": "e"}, "r.example": {"auth": "Ym9iOnA6MQ=="}},
        });
        assert_eq!(after, expected);
        let gone = written(&after.to_string(), |logins| assert!(logins.remove(&registry)));
        assert!(!gone.contains("r.example") && gone.contains("a.example"));
        written("null", |logins| assert!(!logins.remove(&registry)));
    }

    #[test]
    fn the_hub_has_the_name_that_docker_gives_it() {
        let hub = LoginRegistry::parse("docker.io").unwrap();
        let text = written("{}", |logins| logins.set(&hub, Some(("u", &Secret::new("p")))));
        assert_eq!(
            text,
            "{\n\t\"auths\": {\n\t\t\"https://index.docker.io/v1/\": {\n\t\t\t\"auth\": \"dTpw\"\n\t\t}\n\t}\n}\n"
        );
    }

    #[test]
    fn a_broken_file_is_reported_and_not_changed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        for text in ["{\"auths\": \"hunter2\"}", "{\"auths\": {\"r\": {\"auth\": 1}}} ", "hunter2", "{} {}"] {
            fs_err::write(&path, text).unwrap();
            let failure = DockerLoginFile::named_or_usual(Some(&path)).unwrap().read().err().unwrap();
            assert!(failure.message().contains("config.json: line 1"), "{failure:?}");
            assert!(!format!("{failure:?}").contains("hunter2"), "{failure:?}");
        }
    }
}
