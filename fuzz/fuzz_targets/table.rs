#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| (larder_testkit_peers::fuzz::target("table").expect("a target").fuzz_one)(data));
