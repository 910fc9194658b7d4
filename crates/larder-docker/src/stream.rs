//! Splits a stream into JSON values, whatever the chunk boundaries.

use serde::de::DeserializeOwned;

/// The largest accepted value, in bytes.
const LARGEST: usize = 1 << 20;

/// The bytes of an incomplete value.
#[derive(Debug, Default)]
pub(crate) struct JsonStreamBuffer {
    rest: Vec<u8>,
}

impl JsonStreamBuffer {
    /// Adds a chunk; returns the values that are complete now.
    pub(crate) fn push<T: DeserializeOwned>(&mut self, bytes: &[u8]) -> Result<Vec<T>, String> {
        self.rest.extend_from_slice(bytes);
        let mut values = serde_json::Deserializer::from_slice(&self.rest).into_iter::<T>();
        let mut whole = Vec::new();
        let mut used = 0;
        while let Some(value) = values.next() {
            match value {
                Ok(value) => whole.push(value),
                Err(error) if error.is_eof() => break,
                Err(error) => return Err(error.to_string()),
            }
            used = values.byte_offset();
        }
        self.rest.drain(..used);
        if self.rest.len() > LARGEST {
            return Err(format!("message larger than {LARGEST} bytes"));
        }
        Ok(whole)
    }

    /// Ends the stream. Fails within a value.
    pub(crate) fn end(self) -> Result<(), String> {
        let cut = self.rest.iter().any(|byte| !byte.is_ascii_whitespace());
        if cut { Err("ends within a message".into()) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn values_are_found_however_they_are_cut() {
        let text = "{\"a\":1}\r\n{\"b\":\"x\\\"}\"} {}";
        for cut in 0..=text.len() {
            let (first, second) = text.split_at(cut);
            let mut values = JsonStreamBuffer::default();
            let mut found: Vec<Value> = values.push(first.as_bytes()).unwrap();
            found.extend(values.push::<Value>(second.as_bytes()).unwrap());
            assert_eq!(values.end(), Ok(()));
            assert_eq!(found, [json!({"a": 1}), json!({"b": "x\"}"}), json!({})], "cut at {cut}");
        }
    }

    #[test]
    fn a_truncated_value_is_an_error() {
        for (text, whole) in [("{}\r\n", true), ("", true), ("{} {\"a\"", false), ("{}{", false)] {
            let mut values = JsonStreamBuffer::default();
            values.push::<Value>(text.as_bytes()).unwrap();
            assert_eq!(values.end().is_ok(), whole, "{text}");
        }
    }

    #[test]
    fn invalid_or_endless_json_is_an_error() {
        assert!(JsonStreamBuffer::default().push::<Value>(b"<html>").is_err());
        let endless = [b"{\"a\":\"".to_vec(), vec![b'x'; LARGEST]].concat();
        assert!(JsonStreamBuffer::default().push::<Value>(&endless).is_err());
    }
}
