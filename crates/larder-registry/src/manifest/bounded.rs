//! Lists and maps that fail beyond a bound while they are parsed, so that a small hostile document cannot
//! allocate much memory. `null` parses as empty: Go writes a nil list so.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::ManifestError;

/// Parses a JSON object. serde also accepts an array of field values, which no other parser does.
pub(super) fn object<T: DeserializeOwned>(raw: &[u8]) -> Result<T, ManifestError> {
    if raw.trim_ascii_start().first().is_some_and(|first| *first != b'{') {
        return Err(ManifestError::Malformed(serde_json::Error::custom("not a JSON object")));
    }
    serde_json::from_slice(raw).map_err(ManifestError::Malformed)
}

/// Parses a list of at most `N` elements; `#[serde(deserialize_with = "bounded::list::<N, _, _>")]`.
pub(super) fn list<'de, const N: usize, T: Deserialize<'de>, D: Deserializer<'de>>(
    from: D,
) -> Result<Vec<T>, D::Error> {
    from.deserialize_any(LimitedList::<N, T>(PhantomData))
}

/// The first elements of a list.
#[derive(Debug)]
pub(crate) struct FirstElements<T> {
    pub(crate) elements: Vec<T>,
    /// True if the list has others behind them, which are neither parsed nor kept.
    pub(crate) has_more: bool,
}

/// Parses the first `N` elements of a list; `#[serde(deserialize_with = "bounded::first::<N, _, _>")]`.
pub(super) fn first<'de, const N: usize, T: Deserialize<'de>, D: Deserializer<'de>>(
    from: D,
) -> Result<FirstElements<T>, D::Error> {
    from.deserialize_any(CutList::<N, T>(PhantomData))
}

struct CutList<const N: usize, T>(PhantomData<T>);

impl<'de, const N: usize, T: Deserialize<'de>> Visitor<'de> for CutList<N, T> {
    type Value = FirstElements<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_unit<E>(self) -> Result<FirstElements<T>, E> {
        Ok(FirstElements { elements: Vec::new(), has_more: false })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<FirstElements<T>, A::Error> {
        let mut elements = Vec::new();
        while elements.len() < N {
            let Some(element) = list.next_element()? else {
                return Ok(FirstElements { elements, has_more: false });
            };
            elements.push(element);
        }
        let mut has_more = false;
        while let Some(IgnoredAny) = list.next_element()? {
            has_more = true;
        }
        Ok(FirstElements { elements, has_more })
    }
}

struct LimitedList<const N: usize, T>(PhantomData<T>);

impl<'de, const N: usize, T: Deserialize<'de>> Visitor<'de> for LimitedList<N, T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {N} elements")
    }

    fn visit_unit<E>(self) -> Result<Vec<T>, E> {
        Ok(Vec::new())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Vec<T>, A::Error> {
        let mut list = Vec::new();
        while let Some(element) = elements.next_element()? {
            if list.len() == N {
                return Err(A::Error::custom(format_args!("more than {N} elements in a list")));
            }
            list.push(element);
        }
        Ok(list)
    }
}

/// Parses a map of strings with at most `N` entries; `null` as a value parses as the empty string.
pub(super) fn texts<'de, const N: usize, D: Deserializer<'de>>(
    from: D,
) -> Result<BTreeMap<String, String>, D::Error> {
    from.deserialize_any(LimitedStringMap::<N>)
}

struct LimitedStringMap<const N: usize>;

impl<'de, const N: usize> Visitor<'de> for LimitedStringMap<N> {
    type Value = BTreeMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a map of at most {N} strings")
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(BTreeMap::new())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
        let mut map = BTreeMap::new();
        while let Some((key, value)) = entries.next_entry::<String, Option<String>>()? {
            if map.len() == N {
                return Err(A::Error::custom(format_args!("more than {N} entries in a map")));
            }
            map.insert(key, value.unwrap_or_default());
        }
        Ok(map)
    }
}

/// A field that may be `null`, which is then its default.
pub(super) fn or_default<'de, T: Deserialize<'de> + Default, D: Deserializer<'de>>(
    from: D,
) -> Result<T, D::Error> {
    Ok(Option::<T>::deserialize(from)?.unwrap_or_default())
}

/// Whether a field is present and not `null`; its content is skipped without allocation.
pub(super) fn present<'de, D: Deserializer<'de>>(from: D) -> Result<bool, D::Error> {
    Ok(Option::<IgnoredAny>::deserialize(from)?.is_some())
}
