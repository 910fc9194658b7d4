//! Numbers, times and sizes.

use std::marker::PhantomData;
use std::time::Duration;

use larder::config::GoDuration;
use larder::go_format::quote;
use serde_json::{Value, json};

use super::{FlagValueKind, SettingCodec};
use crate::manifest::InputProblem;
use crate::manifest::tree::NodeCursor;
use crate::quantity::{LONGEST, read_size};

/// A whole number from `MIN` to `MAX`.
pub(in crate::config) struct IntegerCodec<T, const MIN: i64, const MAX: i64>(PhantomData<T>);

/// Whole numbers as kubelet has them: the range is checked later, with kubelet's messages.
pub(in crate::config) type KubeletIntCodec = IntegerCodec<i32, { i32::MIN as i64 }, { i32::MAX as i64 }>;

impl<T, const MIN: i64, const MAX: i64> SettingCodec for IntegerCodec<T, MIN, MAX>
where
    T: TryFrom<i64> + Copy,
    i64: TryFrom<T>,
{
    type Value = T;
    const KIND: FlagValueKind = FlagValueKind::Number;

    fn name() -> String {
        match (MIN, MAX) {
            (0, 100) => "percent".into(),
            _ => "whole number".into(),
        }
    }

    fn parse(at: &NodeCursor<'_>) -> Result<T, InputProblem> {
        let number = at.number()?;
        let whole = number.parse::<i64>().ok().filter(|whole| (MIN..=MAX).contains(whole));
        whole.and_then(|whole| T::try_from(whole).ok()).ok_or_else(|| {
            at.problem(format!("must be a whole number from {MIN} to {MAX}, is {}", quote(number)))
        })
    }

    fn print(value: &T) -> Value {
        i64::try_from(*value).map_or(Value::Null, |number| json!(number))
    }
}

/// A duration of kubelet's: any that Go reads; the range is checked later, with kubelet's messages.
pub(in crate::config) struct GoDurationCodec;

impl SettingCodec for GoDurationCodec {
    type Value = GoDuration;

    fn name() -> String {
        "duration".into()
    }

    fn parse(at: &NodeCursor<'_>) -> Result<GoDuration, InputProblem> {
        if at.is_number() && at.number()? != "0" {
            let hint = "add the unit, such as 90s";
            return Err(at.must_be("a duration").hint(hint));
        }
        let text = if at.is_number() { "0" } else { at.text()? };
        GoDuration::parse(text).map_err(|error| at.problem(format!("{}: {error}", quote(text))))
    }

    fn print(value: &GoDuration) -> Value {
        json!(value.to_string())
    }
}

/// A duration from `MIN` seconds to a year.
pub(in crate::config) struct DurationCodec<const MIN: u64>;

impl<const MIN: u64> SettingCodec for DurationCodec<MIN> {
    type Value = Duration;

    fn name() -> String {
        "duration".into()
    }

    fn parse(at: &NodeCursor<'_>) -> Result<Duration, InputProblem> {
        let written = GoDurationCodec::parse(at)?;
        match written.to_std() {
            Some(time) if (Duration::from_secs(MIN)..=LONGEST).contains(&time) => Ok(time),
            _ => Err(at.problem(format!("must be from {MIN}s to 8760h (one year), is {written}"))),
        }
    }

    fn print(value: &Duration) -> Value {
        json!(larder::go_format::duration(*value))
    }
}

/// A duration up to a year; 0 is none.
pub(in crate::config) struct OptionalDurationCodec;

impl SettingCodec for OptionalDurationCodec {
    type Value = Option<Duration>;

    fn name() -> String {
        "duration".into()
    }

    fn parse(at: &NodeCursor<'_>) -> Result<Option<Duration>, InputProblem> {
        DurationCodec::<0>::parse(at).map(|time| Some(time).filter(|time| !time.is_zero()))
    }

    fn print(value: &Option<Duration>) -> Value {
        DurationCodec::<0>::print(&value.unwrap_or_default())
    }
}

/// A size in bytes, with or without a unit; at least `MIN`.
pub(in crate::config) struct ByteSizeCodec<const MIN: u64>;

impl<const MIN: u64> SettingCodec for ByteSizeCodec<MIN> {
    type Value = u64;

    fn name() -> String {
        "size".into()
    }

    fn parse(at: &NodeCursor<'_>) -> Result<u64, InputProblem> {
        let text = if at.is_number() { at.number()? } else { at.text()? };
        let bytes = match text.parse::<u64>() {
            Ok(bytes) => Ok(Some(bytes)),
            Err(_) => read_size(text),
        };
        match bytes {
            Ok(Some(bytes)) if (MIN..=1 << 60).contains(&bytes) => Ok(bytes),
            Ok(_) => Err(at.problem(format!("must be from {} to 1024PiB, is {text}", size_text(MIN)))),
            Err(wrong) => Err(at.problem(wrong)),
        }
    }

    fn print(value: &u64) -> Value {
        let text = size_text(*value);
        if text.ends_with('B') { json!(text) } else { json!(value) }
    }
}

/// A size, exactly, in the largest unit that fits: `16MiB`, `1500`.
fn size_text(bytes: u64) -> String {
    let unit = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)]
        .into_iter()
        .find(|(_, bits)| bytes > 0 && bytes.trailing_zeros() >= *bits);
    unit.map_or_else(|| bytes.to_string(), |(name, bits)| format!("{}{name}", bytes >> bits))
}
