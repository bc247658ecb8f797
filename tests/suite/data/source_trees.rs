//! A folder of source files read as tokens.

use super::*;

#[test]
fn a_source_tree_is_read_in_order_and_without_the_rest() {
    let folder = tempdir().unwrap();
    let write = |name: &str, content: &[u8]| {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    };
    // Written out of order.
    write("z.rs", b"5");
    write("b/y.md", b"4");
    write("b/a/deep.rs", "3é".as_bytes());
    write("a.rs", b"1");
    write("a.txt", b"no: extension");
    write("rs", b"no: no extension");
    write("b.rs/x.rs", b"6"); // a folder may have a file's name
    write(".git/x.rs", b"no: hidden folder");
    write("target/debug/x.rs", b"no: build output");
    write("b/target/x.rs", b"no: build output");
    write("latin1.rs", b"no: \xE9");
    write("targets.rs", b"7");
    #[cfg(unix)]
    std::os::unix::fs::symlink(folder.path(), folder.path().join("b/cycle")).unwrap();

    let tokens = Tokens::source_tree(folder.path(), &["rs", ".md"]).unwrap();
    let expected: Vec<u32> = "13é4675".bytes().map(u32::from).collect();
    assert_eq!(tokens.to_vec().unwrap(), expected);
    assert_eq!(tokens.vocab_size(), 256);
    let only = Tokens::source_tree(folder.path(), &["md"]).unwrap();
    assert_eq!(only.to_vec().unwrap(), [u32::from(b'4')]);

    refusal(
        Tokens::source_tree(folder.path(), &[]),
        &["extensions", "at least one"],
    );
    write("c.lat", b"\xE9");
    let name = folder.path().display().to_string();
    let parts = [
        &name,
        "extension lat, py",
        "0 bytes",
        "1 such files are not UTF-8",
    ];
    refusal(Tokens::source_tree(folder.path(), &["lat", "py"]), &parts);
}
