//! The JSON document of a table of contents, which zstd:chunked and eStargz share. Decoded entry by entry.
//!
//! Decoders of other runtimes ignore unknown fields and the case of names, so one document could have two meanings.
//! Here an unknown field is an error, as is one that occurs twice.

use std::borrow::Cow;
use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::error::{TocError, excerpt};

/// The only version there is.
const VERSION: u64 = 1;

/// One entry as it is written. A missing field is 0 or empty.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct TocRecord<'a> {
    #[serde(borrow, rename = "type")]
    pub(super) kind: Cow<'a, str>,
    #[serde(borrow, default)]
    pub(super) name: Cow<'a, str>,
    #[serde(borrow, default)]
    pub(super) link_name: Cow<'a, str>,
    #[serde(default)]
    pub(super) mode: u32,
    #[serde(default)]
    pub(super) size: u64,
    #[serde(default)]
    pub(super) uid: u64,
    #[serde(default)]
    pub(super) gid: u64,
    #[serde(borrow, default)]
    pub(super) modtime: Cow<'a, str>,
    #[serde(default)]
    pub(super) dev_major: u64,
    #[serde(default)]
    pub(super) dev_minor: u64,
    #[serde(default)]
    pub(super) xattrs: TocXattrs,
    #[serde(borrow, default)]
    pub(super) digest: Cow<'a, str>,
    #[serde(default)]
    pub(super) offset: u64,
    #[serde(default)]
    pub(super) end_offset: u64,
    #[serde(default)]
    pub(super) inner_offset: u64,
    #[serde(default)]
    pub(super) chunk_size: u64,
    #[serde(default)]
    pub(super) chunk_offset: u64,
    #[serde(borrow, default)]
    pub(super) chunk_digest: Cow<'a, str>,
    #[serde(borrow, default)]
    pub(super) chunk_type: Cow<'a, str>,
    #[serde(borrow, default, rename = "accesstime")]
    _accesstime: Cow<'a, str>,
    #[serde(borrow, default, rename = "changetime")]
    _changetime: Cow<'a, str>,
    #[serde(borrow, default, rename = "userName")]
    _user_name: Cow<'a, str>,
    #[serde(borrow, default, rename = "groupName")]
    _group_name: Cow<'a, str>,
    /// Written by old versions of eStargz, always 0.
    #[serde(default, rename = "NumLink")]
    _num_link: u64,
}

/// Extended attributes, in the order of the document.
#[derive(Debug, Default)]
pub(super) struct TocXattrs(pub(super) Vec<(Vec<u8>, Vec<u8>)>);

impl<'de> Deserialize<'de> for TocXattrs {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<TocXattrs, D::Error> {
        from.deserialize_map(XattrVisitor)
    }
}

struct XattrVisitor;

impl<'de> Visitor<'de> for XattrVisitor {
    type Value = TocXattrs;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of extended attributes")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<TocXattrs, A::Error> {
        let mut xattrs: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
        while let Some((name, value)) = map.next_entry::<String, String>()? {
            let value = STANDARD
                .decode(&value)
                .map_err(|_| A::Error::custom(format_args!("attribute {name:?} is not base64")))?;
            xattrs.push((name.into_bytes(), value));
        }
        let mut names: Vec<_> = xattrs.iter().map(|(name, _)| name).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            let name = String::from_utf8_lossy(pair[0]);
            return Err(A::Error::custom(format_args!("attribute {name:?} occurs twice")));
        }
        Ok(TocXattrs(xattrs))
    }
}

/// Decodes a document, and calls `add` for each of its entries.
pub(super) fn read_document(
    json: &[u8],
    mut add: impl FnMut(TocRecord<'_>) -> Result<(), TocError>,
) -> Result<(), TocError> {
    let mut refused = None;
    let mut decoder = serde_json::Deserializer::from_slice(json);
    let entries = RecordVisitor(&mut |record: TocRecord<'_>| {
        add(record).map_err(|error| {
            refused = Some(error);
            Refused
        })
    });
    let parts = decoder.deserialize_map(DocumentVisitor(Some(entries))).and_then(|parts| {
        decoder.end()?;
        Ok(parts)
    });
    if let Some(error) = refused {
        return Err(error);
    }
    let parts =
        parts.map_err(|error| TocError::Json(excerpt(&error.to_string()).escape_debug().to_string()))?;
    match parts.version {
        Some(VERSION) => {}
        Some(version) => return Err(TocError::Version(version.to_string())),
        None => return Err(TocError::Missing("version")),
    }
    if parts.has_entries { Ok(()) } else { Err(TocError::Missing("entries")) }
}

/// Parts of a document beside its entries.
#[derive(Default)]
struct DocumentParts {
    version: Option<u64>,
    has_entries: bool,
    has_tar_split: bool,
}

/// The entry was refused, with an error of its own.
struct Refused;

struct DocumentVisitor<'f, F>(Option<RecordVisitor<'f, F>>);

impl<'de, F: FnMut(TocRecord<'_>) -> Result<(), Refused>> Visitor<'de> for DocumentVisitor<'_, F> {
    type Value = DocumentParts;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a table of contents")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<DocumentParts, A::Error> {
        let mut parts = DocumentParts::default();
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            match &*key {
                "version" if parts.version.is_none() => parts.version = Some(map.next_value()?),
                "entries" if !parts.has_entries => {
                    parts.has_entries = true;
                    if let Some(entries) = self.0.take() {
                        map.next_value_seed(entries)?;
                    }
                }
                "tarSplitDigest" if !parts.has_tar_split => {
                    parts.has_tar_split = true;
                    map.next_value::<IgnoredAny>()?;
                }
                other => {
                    return Err(A::Error::custom(format_args!("unknown or repeated field {other:?}")));
                }
            }
        }
        Ok(parts)
    }
}

struct RecordVisitor<'f, F>(&'f mut F);

impl<'de, F: FnMut(TocRecord<'_>) -> Result<(), Refused>> DeserializeSeed<'de> for RecordVisitor<'_, F> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_seq(self)
    }
}

impl<'de, F: FnMut(TocRecord<'_>) -> Result<(), Refused>> Visitor<'de> for RecordVisitor<'_, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of entries")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        while let Some(record) = list.next_element::<TocRecord<'de>>()? {
            (self.0)(record).map_err(|Refused| A::Error::custom("refused"))?;
        }
        Ok(())
    }
}
