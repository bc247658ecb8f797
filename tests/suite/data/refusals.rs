//! Files and ids that are refused, and the errors.

use super::*;
use rstest::rstest;
use tallow::data::{RandomBatches, SequentialBatches, write_tokens};

#[rstest]
#[case::empty(vec![], &["empty", "0 bytes"])]
#[case::odd(vec![1, 0, 2, 0, 77], &["5 bytes", "offset 4", "value 77", "Tokens::bytes"])]
#[case::one_byte(vec![9], &["1 bytes", "offset 0", "value 9"])]
#[case::cut_header(header(20240520, 1, 1)[..1000].to_vec(), &["1000 bytes", "1024", "magic 20240520 at offset 0"])]
#[case::version_u16(header(20240520, 7, 0), &["version 7 at offset 4", "expected 1", "20240520"])]
#[case::version_u32(header(20240801, 1, 0), &["version 1 at offset 4", "expected 7", "20240801"])]
#[case::no_tokens(header(20240520, 1, 0), &["token count 0 at offset 8", "0 bytes follow"])]
#[case::negative([header(20240520, 1, -1), vec![0; 2]].concat(), &["token count -1 at offset 8", "2 bytes follow"])]
#[case::too_few(
    [header(20240520, 1, 3), vec![0; 4]].concat(),
    &["token count 3 at offset 8", "4 bytes follow", "2 a token"]
)]
#[case::too_many(
    [header(20240801, 7, 1), vec![0; 8]].concat(),
    &["token count 1 at offset 8", "8 bytes follow", "4 a token"]
)]
#[case::half_a_token([header(20240520, 1, 1), vec![0; 3]].concat(), &["token count 1 at offset 8", "3 bytes follow"])]
fn malformed_files(#[case] content: Vec<u8>, #[case] parts: &[&str]) {
    let (_folder, path) = file(&content);
    let error = refusal(Tokens::open(&path, 65_536), parts);
    assert!(matches!(error, Error::Format { .. }));
    refusal(Tokens::open(&path, 65_536), &["tokens.bin"]);
}

#[test]
fn a_format_that_is_not_the_files() {
    let content = [header(20240801, 7, 2), vec![0; 8]].concat();
    let (_folder, path) = file(&content);
    let parts = [
        "tokens.bin",
        "magic 20240801 at offset 0",
        "expected 20240520",
    ];
    refusal(Tokens::open_as(&path, TokenFormat::HeaderedU16, 10), &parts);
    // Opened explicitly as raw, the header is read as tokens.
    let raw = Tokens::open_as(&path, TokenFormat::RawU16, 65_536).unwrap();
    assert_eq!(raw.len(), content.len() / 2);
}

/// Headers whose magic number has one wrong bit or two wrong bytes are not read as raw ids.
#[rstest]
#[case(20240520, 1, 2)]
#[case(20240801, 7, 4)]
fn a_damaged_magic_number(#[case] magic: u32, #[case] version: u32, #[case] token_bytes: usize) {
    let content = [header(magic, version, 3), vec![1; 3 * token_bytes]].concat();
    let (_folder, path) = file(&content);
    Tokens::open(&path, 1 << 25).unwrap();
    let bits = (0..32).map(|bit| 1u32 << bit);
    let bytes = (1..=255).map(|n| n * 0x0101);
    for flips in bits.chain(bytes) {
        let mut damaged = content.clone();
        damaged[..4].copy_from_slice(&(magic ^ flips).to_le_bytes());
        fs::write(&path, &damaged).unwrap();
        let found = format!("magic {} at offset 0", (magic ^ flips) as i32);
        let parts = ["tokens.bin", &found, "damaged", "TokenFormat::RawU16"];
        let error = refusal(Tokens::open(&path, 1 << 25), &parts);
        assert!(matches!(error, Error::Format { .. }), "{error:?}");
        // Also with another error further on, so that only part of the header identifies it.
        damaged[9] ^= 1;
        fs::write(&path, &damaged).unwrap();
        refusal(Tokens::open(&path, 1 << 25), &parts);
        damaged[9] ^= 1;
        damaged[500] ^= 1;
        fs::write(&path, &damaged).unwrap();
        refusal(Tokens::open(&path, 1 << 25), &parts);
    }
    // Opened explicitly as raw, the file is read as raw ids.
    let raw = Tokens::open_as(&path, TokenFormat::RawU16, 65_536).unwrap();
    assert_eq!(raw.len(), content.len() / 2);
}

/// Raw ids of 32 and 64 bits are detected, since as u16 each id would be followed by its upper half.
#[rstest]
#[case::u32_(4, 50_257, "raw u32 ids: every second u16 is 0, in all 400")]
#[case::u32_of_a_large_vocabulary(4, 128_256, "raw u32 ids: every second u16 is an upper half")]
#[case::u32_of_few_ids(4, 11, "raw u32 ids")]
#[case::i64_(8, 50_257, "raw i64 ids: three of four u16 are 0, in all 800")]
fn wider_raw_ids(#[case] bytes: usize, #[case] vocab_size: usize, #[case] words: &str) {
    let ids = (0..200u64).map(|i| i * 2_654_435_761 % vocab_size as u64);
    let content: Vec<u8> = ids
        .flat_map(|id| id.to_le_bytes()[..bytes].to_vec())
        .collect();
    let (_folder, path) = file(&content);
    let parts = ["tokens.bin", "expected raw u16 ids", words, "HeaderedU32"];
    let error = refusal(Tokens::open(&path, vocab_size), &parts);
    assert!(matches!(error, Error::Format { .. }), "{error:?}");
    Tokens::open_as(&path, TokenFormat::RawU16, 1 << 16).unwrap();
}

/// u16 ids are not mistaken for wider ones: small vocabularies, many zeros, every second id 0 except one.
#[test]
fn u16_ids_are_not_taken_for_wider_ones() {
    let files: [&dyn Fn(usize) -> u16; 6] = [
        &|_| 9,
        &|i| (i % 2) as u16,
        &|i| if i % 2 == 0 { 7 } else { 0 }, // a pattern
        &|i| if i % 5 == 0 { i as u16 } else { 0 },
        &|i| {
            if i % 2 == 0 || i == 39_997 {
                i as u16
            } else {
                0
            }
        },
        &|i| (i * 7919 % 50_257) as u16,
    ];
    for id_at in files {
        let ids: Vec<u16> = (0..40_000).map(id_at).collect();
        let content: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let (_folder, path) = file(&content);
        for vocab_size in [1 << 16, 128_256, 1 << 40] {
            let read = Tokens::open(&path, vocab_size).unwrap().to_vec().unwrap();
            assert!(
                read.iter()
                    .zip(&ids)
                    .all(|(read, id)| *read == u32::from(*id))
            );
        }
    }
    // Too few to decide.
    let (_folder, path) = file(&[1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0]);
    assert_eq!(Tokens::open(&path, 10).unwrap().len(), 8);
}

/// A sparse file may have more tokens than memory: reading all of them is an error, reading a part is not.
#[test]
fn more_tokens_than_memory() {
    let (_folder, path) = file(&[1]);
    let sparse = fs::File::options().write(true).open(&path).unwrap();
    sparse.set_len(1 << 42).unwrap();
    let tokens = Tokens::bytes(&path).unwrap();
    let error = refusal(tokens.to_vec(), &["tokens.bin", "its ids"]);
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error:?}");
    assert_eq!(tokens.slice(0..2).unwrap().to_vec().unwrap(), [1, 0]);
}

/// Without a magic number, a file is read as raw ids only if its name ends in .bin and all ids fit.
#[test]
fn raw_ids_by_name_and_content() {
    let (_folder, path) = file(&[1, 0, 2, 0, 9, 0]);
    assert_eq!(
        Tokens::open(&path, 10).unwrap().to_vec().unwrap(),
        [1, 2, 9]
    );
    let parts = [
        "tokens.bin",
        "token 2",
        "byte offset 4",
        "is 9",
        "vocabulary of 9",
    ];
    refusal(Tokens::open(&path, 9), &parts);
    for name in ["tokens.txt", "tokens"] {
        let other = path.with_file_name(name);
        fs::copy(&path, &other).unwrap();
        let parts = [
            name,
            "magic number",
            ".bin",
            "Tokens::open_as",
            "TokenFormat::RawU16",
        ];
        let error = refusal(Tokens::open(&other, 10), &parts);
        assert!(matches!(error, Error::Format { .. }), "{error:?}");
        Tokens::open_as(&other, TokenFormat::RawU16, 10).unwrap();
    }
}

/// If another process truncates a file, the next read beyond its end is an error, not a crash.
#[test]
fn a_file_that_shrinks() {
    let (_folder, path) = file(&[7; 40_000]);
    let sources = [
        Tokens::bytes(&path).unwrap(),
        Tokens::open_as(&path, TokenFormat::RawU16, 65_536).unwrap(),
    ];
    let cut = fs::OpenOptions::new().write(true).open(&path).unwrap();
    cut.set_len(100).unwrap();
    for tokens in sources {
        let mut ids = [0; 50];
        tokens.copy_to(0, &mut ids).unwrap();
        let error = refusal(tokens.to_vec(), &["tokens.bin", "cannot read"]);
        assert!(matches!(error, Error::Io { .. }), "{error:?}");
        let batches = SequentialBatches::new(&tokens, 1, 64).unwrap();
        refusal(batches.batch(100, &CPU), &["tokens.bin", "cannot read"]);
    }
}

#[test]
fn empty_and_unreadable() {
    let (folder, path) = file(b"");
    refusal(Tokens::bytes(&path), &["tokens.bin", "empty"]);
    let missing = folder.path().join("missing.bin");
    let results = [
        (Tokens::bytes(&missing), "missing.bin"),
        (Tokens::open(&missing, 10), "missing.bin"),
        (Tokens::source_tree(&missing, &["rs"]), "missing.bin"),
        (Tokens::bytes(folder.path()), "directory"),
        (Tokens::open(folder.path(), 10), "directory"),
        (Tokens::source_tree(&path, &["rs"]), "tokens.bin"),
    ];
    for (result, part) in results {
        let error = refusal(result, &[part, "cannot read"]);
        assert!(matches!(error, Error::Io { .. }), "{error:?}");
    }
    #[cfg(unix)]
    refusal(Tokens::bytes("/dev/null"), &["/dev/null", "regular file"]);
    refusal(
        Tokens::from_bytes(""),
        &["bytes in memory", "at least 1 token"],
    );
    refusal(
        Tokens::from_ids([], 10),
        &["ids in memory", "at least 1 token"],
    );
    refusal(
        Tokens::from_ids([0], 0),
        &["Tokens::from_ids", "vocab_size", "at least 1"],
    );
    refusal(
        Tokens::open(&path, 0),
        &["Tokens::open", "vocab_size", "at least 1"],
    );
}

/// Token 20,000 of 30,000 is one too high: every access to it is refused and names it; accesses to other tokens work.
#[rstest]
#[case(TokenFormat::RawU16, "byte offset 40000")]
#[case(TokenFormat::HeaderedU16, "byte offset 41024")]
#[case(TokenFormat::HeaderedU32, "byte offset 81024")]
fn an_id_outside_the_vocabulary(#[case] format: TokenFormat, #[case] offset: &str) {
    let mut ids = vec![99; 30_000];
    ids[20_000] = 100;
    let (_folder, path) = file(b"");
    write_tokens(&path, &Tokens::from_ids(ids, 101).unwrap(), format).unwrap();
    Tokens::open(&path, 101).unwrap().validate().unwrap();

    let tokens = Tokens::open_as(&path, format, 100).unwrap();
    let parts = [
        "tokens.bin",
        offset,
        "token 20000",
        "is 100",
        "vocabulary of 100",
    ];
    refusal(tokens.validate(), &parts);
    refusal(tokens.to_vec(), &parts);
    refusal(
        write_tokens(path.with_extension("copy"), &tokens, format),
        &parts,
    );
    // A view counts from the start of the file.
    refusal(tokens.slice(19_990..20_010).unwrap().validate(), &parts);
    tokens.slice(0..20_000).unwrap().validate().unwrap();
    tokens.slice(20_001..30_000).unwrap().validate().unwrap();

    // Windows of 99 inputs; the bad id is in window 202, as an input and as a target.
    let sequential = SequentialBatches::new(&tokens, 1, 99).unwrap();
    for index in 0..sequential.len() {
        let batch = sequential.batch(index, &CPU);
        if index == 20_000 / 99 {
            refusal(batch, &parts);
        } else {
            batch.unwrap();
        }
    }
    let random = RandomBatches::new(&tokens, 1, 2000, 0).unwrap();
    let mut refused = 0;
    for step in 0..100 {
        let start = random.starts(step).next().unwrap();
        let batch = random.batch(step, &CPU);
        if (start..=start + 2000).contains(&20_000) {
            refusal(batch, &parts);
            refused += 1;
        } else {
            batch.unwrap();
        }
    }
    assert!((1..100).contains(&refused));
}

/// A bad id is detected as the first input of a window and as its last target.
#[test]
fn a_bad_id_at_a_windows_edges() {
    for position in [0, 4] {
        let mut content = [0; 10];
        content[2 * position] = 9;
        let (_folder, path) = file(&content);
        let tokens = Tokens::open_as(&path, TokenFormat::RawU16, 9).unwrap();
        let offset = format!("byte offset {},", 2 * position);
        let batch = RandomBatches::new(&tokens, 1, 4, 0).unwrap().batch(0, &CPU);
        refusal(batch, &[&offset, "is 9"]);
    }
}

#[test]
fn the_highest_u16_is_checked() {
    let (_folder, path) = file(&[0xFF, 0xFF]);
    let all = Tokens::open(&path, 65_536).unwrap();
    assert_eq!(all.to_vec().unwrap(), [65_535]);
    let tokens = Tokens::open_as(&path, TokenFormat::RawU16, 65_535).unwrap();
    let parts = ["byte offset 0,", "is 65535", "vocabulary of 65535"];
    refusal(tokens.validate(), &parts);
    refusal(tokens.to_vec(), &parts);
}

#[test]
fn ids_in_memory_are_checked_at_once() {
    let error = refusal(
        Tokens::from_ids([1, 2, 7, 8], 7),
        &["id 7", "position 2", "vocabulary of 7"],
    );
    assert!(matches!(error, Error::TokenId { .. }));
    // The highest possible id, in the largest possible vocabulary.
    assert!(Tokens::from_ids([u32::MAX], u32::MAX as usize).is_err());
    #[cfg(target_pointer_width = "64")]
    assert!(Tokens::from_ids([u32::MAX], 1 << 32).is_ok());
}

/// The size fits in 64 bits, but exceeds the memory.
#[test]
fn a_batch_beyond_memory() {
    let (_folder, path) = file(&[1, 0, 2, 0, 3, 0, 4, 0]);
    let tokens = Tokens::open(&path, 10).unwrap();
    let batches = RandomBatches::new(&tokens, 1 << 40, 2, 0).unwrap();
    assert_eq!(batches.starts(0).len(), 1 << 40); // none of them is stored
    let error = refusal(
        batches.batch(0, &candle_core::Device::Cpu),
        &["a batch", "bytes"],
    );
    assert!(matches!(error, Error::OutOfMemory { .. }));
}
