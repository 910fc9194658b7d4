//! Fast hash tables for access checks, with a seed that is private to the process.

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};
use std::sync::LazyLock;

/// Odd, and with as many ones as zeros.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

static SEED: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(FACTOR) | 1);

/// Numbers by the hash of a text; the caller stores the texts. Entries are never removed.
#[derive(Debug, Default)]
pub(super) struct HashIndex(HashMap<u64, u32, BuildHasherDefault<IdentityHasher>>);

impl HashIndex {
    /// Adds the number of a text, unless the text has one. `is_same` compares with the text of a number.
    pub(super) fn note(&mut self, hash: u64, number: u32, is_same: impl Fn(usize) -> bool) {
        let mut at = hash;
        while let Some(noted) = self.0.get(&at) {
            if is_same(*noted as usize) {
                return;
            }
            at = at.wrapping_add(1);
        }
        self.0.insert(at, number);
    }

    /// The number of a text.
    pub(super) fn find(&self, hash: u64, is_it: impl Fn(usize) -> bool) -> Option<usize> {
        let mut at = hash;
        loop {
            let number = *self.0.get(&at)? as usize;
            if is_it(number) {
                return Some(number);
            }
            at = at.wrapping_add(1);
        }
    }
}

/// The hash of some texts, one after the other.
pub(super) fn hash_of(texts: &[&str]) -> u64 {
    let mut folding = FoldingHasher::default();
    for text in texts {
        folding.write(text.as_bytes());
    }
    folding.finish()
}

/// For tables with texts as keys.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct FoldingHasherBuilder;

impl BuildHasher for FoldingHasherBuilder {
    type Hasher = FoldingHasher;

    fn build_hasher(&self) -> FoldingHasher {
        FoldingHasher::default()
    }
}

/// Multiplies and folds, eight bytes at a time.
#[derive(Debug)]
pub(super) struct FoldingHasher(u64);

impl Default for FoldingHasher {
    fn default() -> Self {
        FoldingHasher(*SEED)
    }
}

impl FoldingHasher {
    fn add_word(&mut self, word: u64) {
        let product = u128::from(self.0 ^ word) * u128::from(FACTOR);
        let [low, high] = [product & u128::from(u64::MAX), product >> 64];
        self.0 = u64::try_from(low ^ high).unwrap_or_default();
    }
}

impl Hasher for FoldingHasher {
    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.add_word(u64::from_le_bytes(*word));
        }
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        self.add_word(u64::from_le_bytes(last) ^ ((bytes.len() as u64) << 56));
    }

    fn finish(&self) -> u64 {
        let mut last = FoldingHasher(self.0);
        last.add_word(*SEED);
        last.0
    }
}

/// For keys that are hashes.
#[derive(Debug, Default)]
pub(super) struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
    fn write(&mut self, bytes: &[u8]) {
        self.0 ^= hash_of(&[&String::from_utf8_lossy(bytes)]);
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_with_the_same_hash_are_distinguished() {
        let texts = ["a", "b", "c", "b"];
        let mut index = HashIndex::default();
        for (number, text) in (0..).zip(texts) {
            index.note(u64::MAX, number, |noted| texts[noted] == text);
        }
        let find = |text: &str| index.find(u64::MAX, |number| texts[number] == text);
        assert_eq!([find("a"), find("b"), find("c"), find("d")], [Some(0), Some(1), Some(2), None]);
    }

    #[test]
    fn where_a_text_ends_counts() {
        let hashes = [&["ab", "c"][..], &["a", "bc"], &["abc"], &["abc", ""], &["abc\0"]].map(hash_of);
        let different: std::collections::HashSet<_> = hashes.into_iter().collect();
        assert_eq!(different.len(), hashes.len());
    }
}
