//! Token files, written and read byte by byte.

use super::*;
use proptest::prelude::*;
use rstest::rstest;
use std::path::Path;
use tallow::data::{RandomBatches, SequentialBatches, write_tokens};

#[rstest]
#[case::raw(TokenFormat::RawU16, &[], &[0x39, 0x05, 0x00, 0x00, 0x50, 0xC4], [1337, 0, 50256])]
#[case::u16(
    TokenFormat::HeaderedU16,
    &[0x88, 0xD8, 0x34, 0x01, 1, 0, 0, 0, 3, 0, 0, 0],
    &[0x39, 0x05, 0x00, 0x00, 0x50, 0xC4],
    [1337, 0, 50256]
)]
#[case::u32(
    TokenFormat::HeaderedU32,
    &[0xA1, 0xD9, 0x34, 0x01, 7, 0, 0, 0, 3, 0, 0, 0],
    &[0x39, 0x05, 0, 0, 0xFF, 0xF4, 0x01, 0x00, 0x04, 0x03, 0x02, 0x01],
    [1337, 128_255, 0x0102_0304]
)]
fn layouts(
    #[case] format: TokenFormat,
    #[case] head: &[u8],
    #[case] body: &[u8],
    #[case] ids: [u32; 3],
) {
    let vocab_size = ids.iter().max().map(|id| *id as usize + 1).unwrap();
    let mut golden = head.to_vec();
    if !head.is_empty() {
        golden.resize(1024, 0);
    }
    assert_eq!(golden.len(), format.header_bytes());
    golden.extend(body);
    assert_eq!(body.len(), 3 * format.token_bytes());

    let (_folder, path) = file(&golden);
    for tokens in [
        Tokens::open(&path, vocab_size).unwrap(),
        Tokens::open_as(&path, format, vocab_size).unwrap(),
    ] {
        assert_eq!((tokens.len(), tokens.vocab_size()), (3, vocab_size));
        assert_eq!(tokens.to_vec().unwrap(), ids);
        tokens.validate().unwrap();
    }

    let written = path.with_file_name("written.bin");
    write_tokens(
        &written,
        &Tokens::from_ids(ids, vocab_size).unwrap(),
        format,
    )
    .unwrap();
    assert_eq!(fs::read(&written).unwrap(), golden);
}

#[test]
fn bytes_are_tokens() {
    let (_folder, path) = file(b"a\xFF\0\n");
    let tokens = Tokens::bytes(&path).unwrap();
    assert_eq!(tokens.vocab_size(), 256);
    assert_eq!(tokens.to_vec().unwrap(), [97, 255, 0, 10]);
    tokens.validate().unwrap();
    let in_memory = Tokens::from_bytes(&b"a\xFF\0\n"[..]).unwrap();
    assert_eq!(in_memory.to_vec().unwrap(), tokens.to_vec().unwrap());
}

/// Equal ids give equal batches in every storage format.
#[test]
fn sources_agree() {
    let ids: Vec<u32> = (0..1000).map(|i| i * i % 256).collect();
    let bytes: Vec<u8> = ids.iter().map(|&id| id as u8).collect();
    let (folder, path) = file(&bytes);
    let in_memory = Tokens::from_ids(ids.clone(), 256).unwrap();
    let mut sources = vec![
        Tokens::bytes(&path).unwrap(),
        Tokens::from_bytes(bytes).unwrap(),
    ];
    for format in FORMATS {
        let path = folder.path().join(format!("{format:?}"));
        write_tokens(&path, &in_memory, format).unwrap();
        sources.push(Tokens::open_as(&path, format, 256).unwrap());
    }
    let of = |tokens: &Tokens| {
        let random = RandomBatches::new(tokens, 5, 17, 3).unwrap();
        let (_, validation) = tokens.split(0.3).unwrap();
        let sequential = SequentialBatches::new(&validation, 2, 17).unwrap();
        let mut all = vec![both(&random.batch(8, &CPU).unwrap())];
        all.extend(sequential.iter(&CPU).map(|batch| both(&batch.unwrap())));
        all
    };
    let expected = of(&in_memory);
    for tokens in sources {
        assert_eq!(tokens.to_vec().unwrap(), ids, "{tokens}");
        assert_eq!(of(&tokens), expected, "{tokens}");
    }
}

proptest! {
    #[test]
    fn round_trip(ids in prop::collection::vec(0u32..50_257, 1..300), format in 0..3usize) {
        let folder = tempdir().unwrap();
        let path = folder.path().join("tokens.bin");
        let tokens = Tokens::from_ids(ids.clone(), 50_257).unwrap();
        write_tokens(&path, &tokens, FORMATS[format]).unwrap();
        prop_assert_eq!(Tokens::open_as(&path, FORMATS[format], 50_257).unwrap().to_vec().unwrap(), ids);
    }
}

/// More tokens than are encoded or scanned at a time, rewritten over their own file.
#[test]
fn a_long_file_is_rewritten_over_itself() {
    let (_folder, path) = file(b"old");
    let ids: Vec<u32> = (0..200_001).map(|i| i * 7919 % 65_536).collect();
    write_tokens(
        &path,
        &Tokens::from_ids(ids.clone(), 65_536).unwrap(),
        TokenFormat::RawU16,
    )
    .unwrap();
    let opened = Tokens::open(&path, 65_536).unwrap();
    write_tokens(&path, &opened, TokenFormat::HeaderedU32).unwrap();
    assert_eq!(opened.to_vec().unwrap(), ids); // still the old file
    let again = Tokens::open(&path, 65_536).unwrap();
    assert_eq!(again.to_vec().unwrap(), ids);
    again.validate().unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 1024 + 4 * 200_001);
}

#[test]
fn a_refused_write_leaves_what_was_there() {
    let (folder, path) = file(b"old");
    // More than is encoded at a time, so that part of the file has been written by then.
    let mut ids = vec![1; 70_001];
    ids[70_000] = 65_536;
    let wide = Tokens::from_ids(ids, 70_000).unwrap();
    for format in [TokenFormat::RawU16, TokenFormat::HeaderedU16] {
        let parts = [
            "tokens.bin",
            "id 65536 at token 70000",
            "up to 65535",
            "HeaderedU32",
        ];
        refusal(write_tokens(&path, &wide, format), &parts);
    }
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1); // no temporary file is left

    let nowhere = folder.path().join("missing").join("out.bin");
    let error = refusal(
        write_tokens(&nowhere, &wide, TokenFormat::HeaderedU32),
        &["out.bin", "cannot write"],
    );
    assert!(matches!(error, Error::Io { .. }));
}

/// A temporary file is private to its owner; the final file has ordinary permissions.
#[cfg(unix)]
#[test]
fn a_written_file_has_ordinary_permissions() {
    use std::os::unix::fs::PermissionsExt;
    let (folder, ordinary) = file(b"x");
    let written = folder.path().join("written.bin");
    write_tokens(&written, &counting(3), TokenFormat::RawU16).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode(&written), mode(&ordinary));
}
