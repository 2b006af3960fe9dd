//! A whole cluster in one process and a real FUSE mount: what ordinary programs do.

mod common;

use common::{AllInOne, random_bytes};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};

#[test]
fn write_then_read_returns_the_same_bytes_on_both_mounts() {
    let cluster = AllInOne::start();
    let data = random_bytes(7, 9 * 1024 * 1024 + 4321);
    let path = cluster.mnt().join("big");
    fs::write(&path, &data).expect("write");
    assert_eq!(fs::metadata(&path).expect("stat").len(), data.len() as u64);
    assert!(fs::read(&path).expect("read") == data, "first mount reads other bytes than were written");
    let (_client, mnt2) = cluster.second_client();
    assert!(fs::read(mnt2.join("big")).expect("read") == data, "second mount reads other bytes than were written");
    // The second mount changes it; the first sees the change at once.
    let f = OpenOptions::new().write(true).open(mnt2.join("big")).expect("open");
    f.write_all_at(b"changed", 1_000_000).expect("write");
    let mut got = [0; 7];
    File::open(&path).expect("open").read_exact_at(&mut got, 1_000_000).expect("read");
    assert_eq!(&got, b"changed");
}

#[test]
fn namespace_calls_behave_as_on_a_local_file_system() {
    let cluster = AllInOne::start();
    let m = cluster.mnt();
    fs::create_dir_all(m.join("a/b/c")).expect("mkdir -p");
    fs::write(m.join("a/f"), b"hello").expect("write");
    fs::hard_link(m.join("a/f"), m.join("a/b/g")).expect("link");
    assert_eq!(fs::metadata(m.join("a/f")).expect("stat").nlink(), 2);
    symlink("../f", m.join("a/b/s")).expect("symlink");
    assert_eq!(fs::read(m.join("a/b/s")).expect("read through a symlink"), b"hello");
    fs::rename(m.join("a/f"), m.join("f2")).expect("rename");
    assert_eq!(fs::read(m.join("f2")).expect("read"), b"hello");
    assert_eq!(fs::metadata(m.join("a/f")).expect_err("gone").kind(), std::io::ErrorKind::NotFound);
    assert_eq!(fs::remove_dir(m.join("a")).expect_err("not empty").raw_os_error(), Some(39));
    fs::set_permissions(m.join("f2"), fs::Permissions::from_mode(0o640)).expect("chmod");
    assert_eq!(fs::metadata(m.join("f2")).expect("stat").mode() & 0o7777, 0o640);
    let exclusive = OpenOptions::new().write(true).create_new(true).open(m.join("f2"));
    assert_eq!(exclusive.expect_err("exists").kind(), std::io::ErrorKind::AlreadyExists);
    let long = "n".repeat(255);
    fs::write(m.join(&long), b"x").expect("name of 255 bytes");
    assert_eq!(fs::write(m.join("n".repeat(256)), b"x").expect_err("too long").raw_os_error(), Some(36));
    fs::remove_dir_all(m.join("a")).expect("rm -r");
    let mut names: Vec<_> = fs::read_dir(&m)
        .expect("readdir")
        .map(|e| e.expect("entry").file_name().into_string().expect("utf-8"))
        .collect();
    names.sort();
    assert_eq!(names, ["f2".to_string(), long]);
}

#[test]
fn directory_of_three_thousand_entries_lists_each_once() {
    let cluster = AllInOne::start();
    let dir = cluster.mnt().join("many");
    fs::create_dir(&dir).expect("mkdir");
    for i in 0..3000 {
        File::create(dir.join(format!("file-{i}"))).expect("create");
    }
    let names: Vec<_> = fs::read_dir(&dir).expect("readdir").map(|e| e.expect("entry").file_name()).collect();
    let unique: std::collections::BTreeSet<_> = names.iter().collect();
    assert_eq!((names.len(), unique.len()), (3000, 3000));
    fs::remove_dir_all(&dir).expect("rm -r");
}

#[test]
fn holes_truncate_append_and_unlinked_files_behave() {
    let cluster = AllInOne::start();
    let path = cluster.mnt().join("f");
    let mut f = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path).expect("open");
    f.write_all_at(b"end", 5_000_000).expect("write");
    let mut hole = vec![1; 4096];
    f.read_exact_at(&mut hole, 2_500_000).expect("read");
    assert!(hole.iter().all(|&b| b == 0), "a hole reads as zeros");
    f.set_len(5_000_001).expect("truncate");
    f.set_len(5_000_010).expect("extend");
    let mut tail = [9; 10];
    f.read_exact_at(&mut tail, 5_000_000).expect("read");
    assert_eq!(&tail, b"e\0\0\0\0\0\0\0\0\0", "bytes cut off never come back");
    let mut a = OpenOptions::new().append(true).open(&path).expect("open for append");
    a.write_all(b"tail").expect("append");
    assert_eq!(fs::metadata(&path).expect("stat").len(), 5_000_014);
    fs::remove_file(&path).expect("unlink");
    f.seek(SeekFrom::Start(5_000_010)).expect("seek");
    let mut rest = String::new();
    f.read_to_string(&mut rest).expect("an unlinked open file still reads");
    assert_eq!(rest, "tail");
    f.sync_all().expect("fsync of an unlinked file");
}

#[test]
fn direct_and_synchronous_writes_of_odd_sizes_are_read_back() {
    let cluster = AllInOne::start();
    let data = random_bytes(11, 2049 * 1024);
    for (name, flags) in [("direct", 0o40000), ("sync", 0o4010000)] {
        let path = cluster.mnt().join(name);
        let f =
            OpenOptions::new().write(true).create(true).truncate(true).custom_flags(flags).open(&path).expect("open");
        f.write_all_at(&data, 0).expect("write");
        f.write_all_at(&data, data.len() as u64).expect("write");
        drop(f);
        let got = fs::read(&path).expect("read");
        assert!(got[..data.len()] == data[..] && got[data.len()..] == data[..], "{name}: other bytes came back");
    }
}

#[test]
fn kill_and_restart_keeps_what_was_answered() {
    let mut cluster = AllInOne::start();
    let m = cluster.mnt();
    let data = random_bytes(3, 3_000_000);
    let f = File::create(m.join("synced")).expect("create");
    f.write_all_at(&data, 0).expect("write");
    f.sync_all().expect("fsync");
    for i in 0..500 {
        fs::create_dir(m.join(format!("d{i}"))).expect("mkdir");
    }
    cluster.kill();
    drop(f);
    cluster.restart();
    assert!(fs::read(m.join("synced")).expect("read") == data, "fsynced bytes are gone");
    for i in 0..500 {
        assert!(m.join(format!("d{i}")).is_dir(), "answered mkdir of d{i} is gone");
    }
    assert_eq!(cluster.stop(), Some(0), "SIGTERM ends it with 0");
    assert!(!common::is_mounted(&m), "SIGTERM leaves no mount behind");
}

#[test]
fn operators_commands_answer() {
    let cluster = AllInOne::start();
    let m = cluster.mnt();
    fs::write(m.join("f"), random_bytes(1, 4 << 20)).expect("write");
    let nodes = cluster.command(&["node", "list", "--json"]);
    for role in ["mgmt", "meta", "storage", "client"] {
        assert!(nodes.contains(role), "{role} is missing in {nodes}");
    }
    let targets: serde_json::Value =
        serde_json::from_str(&cluster.command(&["target", "list", "--json"])).expect("JSON");
    assert_eq!(targets.as_array().map(Vec::len), Some(4), "{targets}");
    cluster.command(&["health", "check"]);
    cluster.command(&["df"]);
    cluster.command(&["net"]);
    let path = m.join("f");
    let info = cluster.command(&["entry", "info", path.to_str().expect("utf-8")]);
    assert!(info.contains("512"), "chunk size is missing in {info}");
    fs::create_dir(m.join("d")).expect("mkdir");
    let d = m.join("d");
    cluster.command(&["entry", "set", d.to_str().expect("utf-8"), "--chunk-size", "1m", "--num-targets", "2"]);
    fs::write(d.join("g"), b"x").expect("write");
    let g = d.join("g");
    let info = cluster.command(&["entry", "info", g.to_str().expect("utf-8"), "--json"]);
    assert!(info.contains("1048576"), "{info}");
    assert!(cluster.command(&["cluster", "token"]).starts_with("bsw1-"));
}
