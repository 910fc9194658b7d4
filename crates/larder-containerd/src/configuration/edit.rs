//! Edits larder's part of containerd's configuration, and takes it back. Pure.
//!
//! Promises: what the edit does not name keeps its text, comments included; an edit of an edited document changes
//! nothing; each line or table of the edit has a comment that names larder, and only these are taken back, unless they
//! were changed since.

use toml_edit::{ArrayOfTables, Decor, DocumentMut, Item, Key, RawString, Table, TableLike, Value};

use super::version::ContainerdVersion;

/// The name of the proxy plugin, and with it of the snapshotter.
pub(super) const SNAPSHOTTER: &str = "larder";

/// Comments of lines that the edit made.
const ADDED: &str = "# added by larder";
const CHANGED: &str = "# set by larder, was ";

const CRI_V1: [&str; 2] = ["plugins", "io.containerd.grpc.v1.cri"];
const CRI_IMAGES: [&str; 2] = ["plugins", "io.containerd.cri.v1.images"];
const TRANSFER: [&str; 2] = ["plugins", "io.containerd.transfer.v1.local"];

/// Snapshotter of larder as the configuration of containerd names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ProxyPlugin {
    /// Path of larder's socket.
    pub(super) address: String,
    /// Directory of larder's store, for the filesystem of images.
    pub(super) root: String,
}

/// Why a configuration cannot be edited.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum EditProblem {
    /// Of version 1, with plugins whose names changed since.
    Version1,
    /// Of a version that this containerd does not read.
    TooNew(i64),
    /// A value should be a table and is something else.
    NoTable(String),
}

/// The documents of a configuration in the order in which containerd reads them, each over the ones before it. The
/// first is the main file.
pub(super) fn configure(
    documents: &mut [DocumentMut],
    version: ContainerdVersion,
    plugin: &ProxyPlugin,
) -> Result<(), EditProblem> {
    set_version(documents, version)?;
    let at = last_with(documents, &["proxy_plugins", SNAPSHOTTER]);
    let proxy = table_at(&mut documents[at], &["proxy_plugins", SNAPSHOTTER])?;
    set(proxy, "type", "snapshot");
    set(proxy, "address", &plugin.address);
    if version.has_exports() {
        set(table_at(&mut documents[at], &["proxy_plugins", SNAPSHOTTER, "exports"])?, "root", &plugin.root);
    }
    if version.has_split_cri() {
        configure_images(documents)?;
        configure_transfer(documents)
    } else {
        let at = last_with(documents, &CRI_V1);
        let cri = table_at(&mut documents[at], &[&CRI_V1[..], &["containerd"]].concat())?;
        set(cri, "snapshotter", SNAPSHOTTER);
        Ok(())
    }
}

/// containerd 2 takes the settings of a file of version 2 over into the tables of version 3, which the file may have as
/// well. It does so with the snapshotter if there is a table of runtimes, and drops it otherwise.
fn configure_images(documents: &mut [DocumentMut]) -> Result<(), EditProblem> {
    let at = last_with(documents, &CRI_IMAGES);
    set(table_at(&mut documents[at], &CRI_IMAGES)?, "snapshotter", SNAPSHOTTER);
    for document in documents.iter_mut().filter(|document| version_of(document) < 3) {
        let path = [&CRI_V1[..], &["containerd"]].concat();
        if find(document.as_table(), &path).is_some_and(|old| old.contains_key("snapshotter")) {
            set(table_at(document, &path)?, "snapshotter", SNAPSHOTTER);
        }
    }
    Ok(())
}

/// An entry replaces the default, which is one for overlayfs.
fn configure_transfer(documents: &mut [DocumentMut]) -> Result<(), EditProblem> {
    let has_entries = |table: &Table| table.contains_key("unpack_config");
    let with_entries =
        documents.iter().rposition(|document| find(document.as_table(), &TRANSFER).is_some_and(has_entries));
    let at = with_entries.unwrap_or_else(|| last_with(documents, &TRANSFER));
    let transfer = table_at(&mut documents[at], &TRANSFER)?;
    if transfer.is_empty() {
        transfer.set_implicit(true); // the entries have headers of their own
    }
    let new = || Item::ArrayOfTables(ArrayOfTables::new());
    let Some(entries) = transfer.entry("unpack_config").or_insert_with(new).as_array_of_tables_mut() else {
        return Err(EditProblem::NoTable(
            "[[plugins.\"io.containerd.transfer.v1.local\".unpack_config]]".into(),
        ));
    };
    let is_first = entries.is_empty();
    let is_of = |entry: &Table, name: &str| entry.get("snapshotter").and_then(Item::as_str) == Some(name);
    if !entries.iter().any(|entry| is_of(entry, SNAPSHOTTER)) {
        entries.push(unpack_entry(SNAPSHOTTER));
    }
    if is_first {
        entries.push(unpack_entry("overlayfs"));
    }
    Ok(())
}

fn unpack_entry(snapshotter: &str) -> Table {
    let mut entry = added_table();
    for (key, text) in [("platform", "linux"), ("snapshotter", snapshotter)] {
        insert(&mut entry, key, "  ", Value::from(text));
    }
    entry
}

/// Takes back what [`configure`] did; a line that was changed since stays.
pub(super) fn restore(document: &mut DocumentMut) {
    restore_table(document.as_table_mut());
    let version = document.get("version").and_then(Item::as_value);
    if document.len() == 1 && version.is_some_and(|value| suffix_of(value).contains(ADDED)) {
        document.remove("version");
    }
}

fn restore_table(table: &mut Table) {
    let keys: Vec<String> = table.iter().map(|(key, _)| key.to_owned()).collect();
    for key in keys {
        if table.get_mut(&key).is_some_and(|item| restore_item(&key, item)) {
            table.remove(&key);
        }
    }
}

/// Returns whether nothing is left of it.
fn restore_item(key: &str, item: &mut Item) -> bool {
    match item {
        Item::None => false,
        Item::Value(current) => restore_value(key, current),
        Item::Table(table) => {
            let (was_added, was_empty) = (is_added(table), table.is_empty());
            if was_added {
                table.decor_mut().set_suffix("");
                table.set_implicit(true); // tables below it may stay
                remove_own_keys(key, table);
            }
            restore_table(table);
            table.is_empty() && (was_added || (table.is_implicit() && !was_empty))
        }
        Item::ArrayOfTables(entries) => {
            let had = entries.iter().any(is_added);
            entries.retain(|entry| !is_own_entry(entry));
            had && entries.is_empty()
        }
    }
}

/// Removes what the edit wrote into a table that it added; nothing if one of the values was changed since.
fn remove_own_keys(name: &str, table: &mut Table) {
    let own: &[&str] = match name {
        SNAPSHOTTER => &["type", "address"],
        "exports" => &["root"],
        _ => &["snapshotter"],
    };
    if own.iter().all(|key| table.get(key).is_none_or(|item| is_own(key, item.as_str()))) {
        for key in own {
            table.remove(key);
        }
    }
}

/// Whether the edit gives a key this value. Paths are those of larder's settings at that time. Other tables may need
/// the version.
fn is_own(key: &str, value: Option<&str>) -> bool {
    match key {
        "type" => value == Some("snapshot"),
        "snapshotter" => value == Some(SNAPSHOTTER),
        "version" => false,
        _ => true,
    }
}

/// Whether an entry of an array was added and needs to go: that of larder's snapshotter, and an unchanged one for
/// overlayfs.
fn is_own_entry(entry: &Table) -> bool {
    let text = |key| entry.get(key).and_then(Item::as_str);
    let is_default = || text("platform") == Some("linux") && entry.len() == 2;
    is_added(entry)
        && match text("snapshotter") {
            Some(SNAPSHOTTER) => true,
            Some("overlayfs") => is_default(),
            _ => false,
        }
}

/// Returns whether the edit added it. One that the edit changed gets its value back.
fn restore_value(key: &str, current: &mut Value) -> bool {
    let suffix = suffix_of(current).to_owned();
    let was_changed_since = !is_own(key, current.as_str());
    if suffix.trim_start().starts_with(ADDED) {
        return !was_changed_since;
    }
    let noted = suffix.trim_start().strip_prefix(CHANGED).and_then(leading_text);
    if let Some((was, rest)) = noted.filter(|_| !was_changed_since) {
        replace(current, was, rest.to_owned());
    }
    false
}

/// A text in quotes as a value, and what follows it.
fn leading_text(line: &str) -> Option<(Value, &str)> {
    let quote = line.chars().next().filter(|quote| ['"', '\''].contains(quote))?;
    let end = 2 + line.get(1..)?.find(quote)?;
    Some((line[..end].parse().ok()?, &line[end..]))
}

/// Whether a document names larder's plugin.
pub(super) fn uses_larder(document: &DocumentMut) -> bool {
    find(document.as_table(), &["proxy_plugins", SNAPSHOTTER]).is_some()
}

/// Whether a document has larder's snapshotter.
pub(super) fn has_plugin(document: &DocumentMut) -> bool {
    let plugin = find(document.as_table(), &["proxy_plugins", SNAPSHOTTER]);
    plugin.and_then(|plugin| plugin.get("type")?.as_str()) == Some("snapshot")
}

/// The keys that name larder's snapshotter.
pub(super) fn references(document: &DocumentMut) -> Vec<String> {
    fn collect(path: &str, table: &dyn TableLike, found: &mut Vec<String>) {
        for (key, item) in table.iter() {
            let path = format!("{path}{}", Key::new(key));
            if key == "snapshotter" && item.as_str() == Some(SNAPSHOTTER) {
                found.push(path);
                continue;
            }
            let below = format!("{path}.");
            if let Some(table) = item.as_table_like() {
                collect(&below, table, found);
            }
            for entry in item.as_array_of_tables().into_iter().flatten() {
                collect(&below, entry, found);
            }
            for entry in item.as_array().into_iter().flatten().filter_map(Value::as_inline_table) {
                collect(&below, entry, found);
            }
        }
    }
    let mut found = Vec::new();
    collect("", document.as_table(), &mut found);
    found
}

/// The runtimes with a snapshotter of their own, and that.
pub(super) fn other_snapshotters(document: &DocumentMut) -> Vec<(String, String)> {
    let tables = [
        [&CRI_V1[..], &["containerd", "runtimes"]].concat(),
        vec!["plugins", "io.containerd.cri.v1.runtime", "containerd", "runtimes"],
        [&CRI_IMAGES[..], &["runtime_platforms"]].concat(),
    ];
    let runtimes = tables.iter().filter_map(|path| find(document.as_table(), path)).flat_map(Table::iter);
    let of_runtime = |(runtime, item): (&str, &Item)| {
        let snapshotter = item.get("snapshotter")?.as_str()?;
        let is_other = !snapshotter.is_empty() && snapshotter != SNAPSHOTTER;
        is_other.then(|| (runtime.to_owned(), snapshotter.to_owned()))
    };
    runtimes.filter_map(of_runtime).collect()
}

/// The version of a document; one without is of version 1.
pub(super) fn version_of(document: &DocumentMut) -> i64 {
    document.get("version").and_then(Item::as_integer).unwrap_or(1)
}

fn set_version(documents: &mut [DocumentMut], version: ContainerdVersion) -> Result<(), EditProblem> {
    let newest = if version.has_split_cri() { 3 } else { 2 };
    let Some(main) = documents.first_mut() else { return Ok(()) };
    let present = version_of(main);
    if present >= 2 {
        let is_read = version.has_split_cri() || present == 2;
        return if is_read { Ok(()) } else { Err(EditProblem::TooNew(present)) };
    }
    let names_plugins = ["plugins", "disabled_plugins", "required_plugins"].iter().any(|key| {
        main.get(key).is_some_and(|item| {
            item.as_table().is_none_or(|table| !table.is_empty())
                && item.as_array().is_none_or(|array| !array.is_empty())
        })
    });
    if names_plugins {
        return Err(EditProblem::Version1);
    }
    main.insert("version", Item::Value(Value::from(newest).decorated(" ", format!(" {ADDED}"))));
    Ok(())
}

/// The last document with a table here: containerd takes a plugin's whole table from it, or merges it over the others.
fn last_with(documents: &[DocumentMut], path: &[&str]) -> usize {
    documents.iter().rposition(|document| find(document.as_table(), path).is_some()).unwrap_or(0)
}

/// The table at a path.
pub(super) fn find<'a>(table: &'a Table, path: &[&str]) -> Option<&'a Table> {
    path.iter().try_fold(table, |table, key| table.get(key)?.as_table())
}

/// The table at a path, made where it is missing.
fn table_at<'a>(document: &'a mut DocumentMut, path: &[&str]) -> Result<&'a mut Table, EditProblem> {
    let mut table = document.as_table_mut();
    for (at, key) in path.iter().enumerate() {
        let new = || {
            let mut parent = Table::new();
            parent.set_implicit(true);
            Item::Table(if at + 1 == path.len() { added_table() } else { parent })
        };
        let item = table.entry(key).or_insert_with(new);
        table = item.as_table_mut().ok_or_else(|| EditProblem::NoTable(path[..=at].join(".")))?;
    }
    Ok(table)
}

fn added_table() -> Table {
    let mut table = Table::new();
    table.decor_mut().set_suffix(format!(" {ADDED}"));
    table
}

fn is_added(table: &Table) -> bool {
    table.decor().suffix().and_then(RawString::as_str).is_some_and(|suffix| suffix.contains(ADDED))
}

fn suffix_of(value: &Value) -> &str {
    value.decor().suffix().and_then(RawString::as_str).unwrap_or_default()
}

/// Sets a text, and notes in a comment what was there. Other comments of the line stay.
fn set(table: &mut Table, key: &str, text: &str) {
    if table.is_implicit() && !table.is_dotted() {
        // Only tables below it have headers so far.
        table.set_implicit(false);
        table.decor_mut().set_suffix(format!(" {ADDED}"));
    }
    let is_ours = is_added(table);
    if let Some(Item::Value(present)) = table.get_mut(key) {
        if present.as_str() == Some(text) {
            return;
        }
        let was = present.clone().decorated("", "");
        let suffix = suffix_of(present);
        // What was there before an earlier edit counts.
        let is_noted = is_ours || suffix.contains(ADDED) || suffix.contains(CHANGED);
        let suffix = if is_noted { suffix.to_owned() } else { format!(" {CHANGED}{was}{suffix}") };
        replace(present, text, suffix);
        return;
    }
    let first = table.iter().next().and_then(|(first, _)| table.key(first));
    let indent = first.and_then(|first| first.leaf_decor().prefix()?.as_str());
    let indent = indent.and_then(|prefix| prefix.rsplit('\n').next()).unwrap_or("  ").to_owned();
    let mut new = Value::from(text);
    if !is_ours {
        new.decor_mut().set_suffix(format!(" {ADDED}"));
    }
    insert(table, key, &indent, new);
}

fn insert(table: &mut Table, key: &str, indent: &str, value: Value) {
    let mut key = Key::new(key);
    key.leaf_decor_mut().set_prefix(indent);
    table.insert_formatted(&key, Item::Value(value));
}

/// Gives a place another value and end of line.
fn replace(value: &mut Value, new: impl Into<Value>, suffix: String) {
    let prefix = value.decor().prefix().cloned();
    *value = new.into();
    *value.decor_mut() = Decor::new(prefix.unwrap_or_else(|| " ".into()), suffix);
}
