//! Tokenizers of Hugging Face folders, and folders found by a model's name.

use crate::check::refusal;
use rstest::rstest;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use tallow::Error;
use tallow::data::Tokens;
use tallow::hf::{self, Tokenizer};
use tallow::model::TransformerConfig;
use tempfile::{TempDir, tempdir};

/// Returns the letter that byte-level BPE writes for a byte: the byte itself if it is visible, otherwise the next free
/// letter from 256 on.
fn letter(byte: u8) -> char {
    let is_seen = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    match is_seen(byte) {
        true => char::from(byte),
        false => {
            let before = (0..byte).filter(|byte| !is_seen(*byte)).count();
            char::from_u32(256 + before as u32).unwrap()
        }
    }
}

/// Returns a byte-level BPE: byte b has id b, `th` 256, `the` 257, and 258 is an added token. It enables truncation and
/// padding.
fn bpe() -> Value {
    let bytes = (0..=255).map(|byte| (letter(byte).to_string(), json!(byte)));
    let merged = [
        ("th".to_string(), json!(256)),
        ("the".to_string(), json!(257)),
    ];
    let vocab: serde_json::Map<String, Value> = bytes.chain(merged).collect();
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 258,
            "pad_type_id": 0, "pad_token": "<|end|>",
        },
        "added_tokens": [{
            "id": 258, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        }],
        "normalizer": null,
        "pre_tokenizer": level,
        "post_processor": null,
        "decoder": level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": [["t", "h"], ["th", "e"]],
        },
    })
}

fn folder_with(text: impl AsRef<[u8]>) -> TempDir {
    let folder = tempdir().unwrap();
    fs::write(folder.path().join("tokenizer.json"), text).unwrap();
    folder
}

fn tokenizer() -> Tokenizer {
    Tokenizer::open(folder_with(bpe().to_string()).path()).unwrap()
}

#[test]
fn texts_are_encoded_whole_and_come_back() {
    let tokenizer = tokenizer();
    assert_eq!(tokenizer.vocab_size(), 259);
    assert_eq!(tokenizer.encode("the<|end|>th").unwrap(), [257, 258, 256]);
    assert_eq!(tokenizer.encode("").unwrap(), [0; 0]);
    assert_eq!(tokenizer.decode(&[]).unwrap(), "");
    let long = "thé theft <|end|> \0\u{1F600} \r\n\t日本 ".repeat(50);
    let ids = tokenizer.encode(&long).unwrap();
    assert!(ids.len() > 1000);
    assert_eq!(tokenizer.decode(&ids).unwrap(), long);
    assert_eq!(tokenizer.decode(&[0xC3]).unwrap(), "\u{FFFD}"); // half of a letter
}

#[test]
fn ids_that_it_has_not() {
    for id in [259, u32::MAX] {
        let error = tokenizer().decode(&[0, id]).unwrap_err();
        assert!(
            matches!(
                error,
                Error::TokenId {
                    position: 1,
                    vocab_size: 259,
                    ..
                }
            ),
            "{error}"
        );
    }
}

#[test]
fn a_model_needs_a_row_for_each_id() {
    let model = |vocab_size| TransformerConfig {
        vocab_size,
        ..Default::default()
    };
    tokenizer().check_fits(&model(259)).unwrap();
    tokenizer().check_fits(&model(320)).unwrap();
    refusal(
        tokenizer().check_fits(&model(258)),
        &["tokenizer.json", "up to 258", "vocab_size is 258"],
    );
}

fn changed(key: &str, value: Value) -> String {
    let mut json = bpe();
    json[key] = value;
    json.to_string()
}

#[rstest]
#[case::nothing("")]
#[case::truncated(&bpe().to_string()[..200])]
#[case::another_format("{}")]
#[case::no_token(&json!({"model": {"type": "WordLevel", "vocab": {}, "unk_token": "?"}}).to_string())]
#[case::a_merge_of_none(&changed("model", json!({"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]})))]
#[case::a_pattern(&changed("pre_tokenizer", json!({
    "type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": false,
})))]
#[case::a_table(&changed("normalizer", json!({"type": "Precompiled", "precompiled_charsmap": "AQ=="})))]
fn files_that_are_refused(#[case] text: &str) {
    let error = refusal(
        Tokenizer::open(folder_with(text).path()),
        &["tokenizer.json"],
    );
    assert!(matches!(error, Error::Format { .. }), "{error}");
}

#[test]
fn a_file_that_is_not_there_or_no_text() {
    refusal(
        Tokenizer::open(tempdir().unwrap().path()),
        &["tokenizer.json: cannot read"],
    );
    Tokenizer::open(folder_with([0xFF]).path()).unwrap_err();
}

#[test]
fn words_without_an_id() {
    let model = json!({"type": "WordLevel", "vocab": {"to": 0, "be": 7}, "unk_token": "?"});
    let folder =
        folder_with(json!({"pre_tokenizer": {"type": "Whitespace"}, "model": model}).to_string());
    let tokenizer = Tokenizer::open(folder.path()).unwrap();
    assert_eq!(tokenizer.vocab_size(), 8);
    assert_eq!(tokenizer.encode("to be").unwrap(), [0, 7]);
    let error = tokenizer.encode("to see").unwrap_err();
    assert!(matches!(error, Error::Data { .. }), "{error}");
    tokenizer.decode(&[3]).unwrap_err(); // between two valid ids
}

#[test]
fn a_text_becomes_data() {
    let data = Tokens::from_bytes("the th")
        .unwrap()
        .encoded(&tokenizer())
        .unwrap();
    assert_eq!(
        (data.to_vec().unwrap(), data.vocab_size()),
        (vec![257, 32, 256], 259)
    );
    let refused = |data: Tokens, words: &str| {
        refusal(data.encoded(&tokenizer()), &[words]);
    };
    refused(Tokens::from_bytes([b'a', 0xFF]).unwrap(), "UTF-8");
    refused(Tokens::from_ids([1], 300).unwrap(), "vocabulary of 300");
}

/// Returns a cache with `org/name`, where `refs/main` contains `commit` and there is a snapshot `abc`.
fn cache(commit: &str) -> TempDir {
    let root = tempdir().unwrap();
    let model = root.path().join("models--org--name");
    fs::create_dir_all(model.join("refs")).unwrap();
    fs::create_dir_all(model.join("snapshots/abc")).unwrap();
    fs::write(model.join("refs/main"), commit).unwrap();
    root
}

#[rstest]
#[case("abc")]
#[case("abc\n")]
fn a_model_in_the_cache(#[case] commit: &str) {
    let root = cache(commit);
    let found = hf::find_in("org/name", Some(root.path())).unwrap();
    assert_eq!(found, root.path().join("models--org--name/snapshots/abc"));
}

/// Older models such as `gpt2` have no owner in their name.
#[test]
fn a_model_without_an_owner() {
    let root = cache("abc");
    let [from, to] = ["models--org--name", "models--name"].map(|name| root.path().join(name));
    fs::rename(from, &to).unwrap();
    let found = hf::find_in("name", Some(root.path())).unwrap();
    assert_eq!(found, to.join("snapshots/abc"));
}

/// A commit downloaded by its hash has no name in `refs`.
#[test]
fn a_cache_without_a_main_revision() {
    let root = cache("abc");
    let model = root.path().join("models--org--name");
    fs::remove_file(model.join("refs/main")).unwrap();
    let find = || hf::find_in("org/name", Some(root.path()));
    assert_eq!(find().unwrap(), model.join("snapshots/abc"));
    fs::create_dir(model.join("snapshots/def")).unwrap();
    refusal(find(), &["2 snapshots"]);
    fs::remove_dir_all(model.join("snapshots")).unwrap();
    refusal(find(), &["hf download org/name"]);
}

#[test]
fn a_folder_of_that_path_wins() {
    let folder = cache("abc");
    let path = folder.path().join("models--org--name");
    assert_eq!(hf::find_in(&path, None).unwrap(), path);
    assert_eq!(hf::find(&path).unwrap(), path);
}

#[test]
fn what_is_not_there_is_said() {
    let root = cache("abc");
    let refused = |name: &str, root: Option<&Path>, words: &[&str]| {
        refusal(hf::find_in(name, root), words);
    };
    let wanted = root.path().join("models--org--other");
    let wanted = wanted.to_str().unwrap();
    refused(
        "org/other",
        Some(root.path()),
        &[wanted, "hf download org/other"],
    );
    refused(
        "org/name",
        None,
        &["no home folder", "hf download org/name"],
    );
    refused(
        "gpt3",
        Some(root.path()),
        &["models--gpt3", "hf download gpt3"],
    );
    for name in [
        "",
        "/org/name",
        "org/name/more",
        "../name",
        "org/..",
        "org/",
    ] {
        refused(name, Some(root.path()), &["no such folder"]);
    }
}

#[rstest]
#[case("def")]
#[case("")]
#[case(".")]
#[case("../refs")]
fn a_commit_without_its_snapshot(#[case] commit: &str) {
    let root = cache(commit);
    let error = refusal(
        hf::find_in("org/name", Some(root.path())),
        &["hf download org/name"],
    );
    assert!(matches!(error, Error::Format { .. }), "{error}");
}
