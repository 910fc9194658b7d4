//! Mutations of known inputs, the same for the same seed.

/// Longest input that is made, in bytes.
const MAX_LEN: usize = 64 << 10;

/// Values that programs often trip over.
const ODD: [&[u8]; 12] = [
    b"",
    b"\0",
    b"../",
    b"/",
    b"\"",
    b"\\u0000",
    b"18446744073709551616",
    b"-1",
    b"\xff\xfe",
    b"{",
    b"[",
    b",",
];

/// Makes new inputs out of known ones.
#[derive(Debug, Clone)]
pub struct Mutator {
    state: u64,
}

impl Mutator {
    /// Equal seeds give equal mutations.
    pub fn new(seed: u64) -> Mutator {
        Mutator { state: seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1 }
    }

    /// A number below `bound`, which is at least 1 (xorshift64*).
    pub fn below(&mut self, bound: usize) -> usize {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        let number = self.state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16;
        usize::try_from(number).unwrap_or(0) % bound.max(1)
    }

    /// One of the seeds with one to four changes.
    pub fn next(&mut self, seeds: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = self.pick(seeds);
        for _ in 0..=self.below(4) {
            self.change(&mut bytes, seeds);
        }
        bytes.truncate(MAX_LEN);
        bytes
    }

    fn pick(&mut self, seeds: &[Vec<u8>]) -> Vec<u8> {
        seeds.get(self.below(seeds.len())).cloned().unwrap_or_default()
    }

    fn change(&mut self, bytes: &mut Vec<u8>, seeds: &[Vec<u8>]) {
        let at = self.below(bytes.len() + 1);
        let end = at + self.below(bytes.len() - at + 1).min(600);
        match self.below(7) {
            0 if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
            1 if at < bytes.len() => bytes[at] = u8::try_from(self.below(256)).unwrap_or(0),
            2 => drop(bytes.drain(at..end)),
            3 => {
                let copy = bytes[at..end].to_vec();
                let to = self.below(bytes.len() + 1);
                bytes.splice(to..to, copy);
            }
            4 => {
                let odd = ODD[self.below(ODD.len())];
                bytes.splice(at..at, odd.iter().copied());
            }
            5 => {
                // The end of another seed.
                let other = self.pick(seeds);
                let from = self.below(other.len() + 1);
                bytes.truncate(at);
                bytes.extend_from_slice(&other[from..]);
            }
            _ => {
                // Tar headers begin at such places.
                let block = self.below(bytes.len() / 512 + 1) * 512;
                let field = (block + self.below(512)).min(bytes.len());
                let odd = ODD[self.below(ODD.len())];
                for (byte, odd) in bytes[field..].iter_mut().zip(odd) {
                    *byte = *odd;
                }
            }
        }
    }
}
