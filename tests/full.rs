//! Full disks: what does not fit gets ENOSPC, what was fsynced stays, everything else goes on.

mod common;

use common::{CLIENT, META, MGMT, STORAGE1, STORAGE2, Separate, random_bytes};
use rustix::fs::{XattrFlags, setxattr};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

fn is_full(e: &io::Error) -> bool {
    e.kind() == io::ErrorKind::StorageFull
}

/// Writes and fsyncs one MiB after the other; the MiBs that were fsynced, and why it ended.
fn fill(path: &Path, mib_max: usize) -> (usize, Option<io::Error>) {
    let file = File::options().create(true).write(true).truncate(true).open(path).expect("create");
    for i in 0..mib_max {
        let bytes = random_bytes(i as u64 + 1, MIB);
        if let Err(e) = file.write_all_at(&bytes, (i * MIB) as u64).and_then(|()| file.sync_all()) {
            return (i, Some(e));
        }
    }
    (mib_max, None)
}

fn check(path: &Path, mib: usize) {
    let file = File::open(path).expect("open");
    let mut bytes = vec![0; MIB];
    for i in 0..mib {
        file.read_exact_at(&mut bytes, (i * MIB) as u64).expect("read");
        assert!(bytes == random_bytes(i as u64 + 1, MIB), "MiB {i} of {} has other bytes", path.display());
    }
}

fn until(what: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(40);
    while !is() {
        assert!(Instant::now() < end, "{what}: not within 40 s");
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn all_alive(cluster: &mut Separate) {
    for which in [MGMT, META, STORAGE1, STORAGE2, CLIENT] {
        assert!(cluster.daemons[which].as_mut().is_some_and(|d| d.ended().is_none()), "{which} has ended");
    }
}

#[test]
fn a_full_target() {
    let mut cluster = Separate::start_on(&[("s1a", 64), ("s1b", 256), ("s2a", 256), ("s2b", 256)]);
    let mnt = cluster.mnt();
    let space = || rustix::fs::statvfs(&mnt).expect("statvfs");
    let total: u64 = cluster
        .disks
        .iter()
        .map(|d| rustix::fs::statvfs(&d.at).expect("statvfs"))
        .map(|s| s.f_blocks * s.f_frsize)
        .sum();
    let shown = space().f_blocks * space().f_frsize;
    assert!(shown.abs_diff(total) < total / 50, "df shows {shown} of {total}");
    fs::write(mnt.join("small"), b"before").expect("write");
    fs::create_dir(mnt.join("one")).expect("mkdir");
    cluster.command(&["entry", "set", mnt.join("one").to_str().expect("utf-8"), "--num-targets", "1"]);

    // A file over all four: ends when the smallest is full.
    let big = mnt.join("big");
    let (kept, why) = fill(&big, 500);
    let why = why.expect("64 MiB were never full");
    assert!(is_full(&why), "after {kept} MiB: {why}");
    assert!((150..260).contains(&kept), "{kept} MiB");
    check(&big, kept);
    assert!(cluster.disks[0].free() < 2 << 20, "{} free", cluster.disks[0].free());

    // All the rest goes on. Room is reported every two seconds; new files avoid the full target then.
    std::thread::sleep(Duration::from_secs(5));
    let free = space().f_bavail * space().f_frsize;
    let really: u64 = cluster.disks.iter().map(common::LoopDisk::free).sum();
    assert!(free.abs_diff(really) < total / 20, "df shows {free} free of {really}");
    assert_eq!(fs::read(mnt.join("small")).expect("read"), b"before");
    let over = random_bytes(1, MIB);
    let file = File::options().write(true).open(&big).expect("open");
    file.write_all_at(&over, 0).and_then(|()| file.sync_all()).expect("bytes that have their place");
    drop(file);
    fs::create_dir(mnt.join("dir")).expect("mkdir");
    for i in 0..30u64 {
        let path = mnt.join(format!("one/{i}"));
        let bytes = random_bytes(i, 300_000);
        fs::write(&path, &bytes).and_then(|()| File::open(&path)?.sync_all()).expect("write to another target");
        assert!(fs::read(&path).expect("read") == bytes);
        fs::rename(&path, mnt.join(format!("dir/{i}"))).expect("rename");
    }
    for i in 0..30 {
        fs::remove_file(mnt.join(format!("dir/{i}"))).expect("unlink");
    }
    let health = cluster.run(&["health", "check"]);
    assert!(cluster.log(STORAGE1).contains("target is full"), "{}", cluster.log(STORAGE1));
    assert!(health.1.contains('1'), "{health:?}");
    all_alive(&mut cluster);

    // A restart of its server on the full disk.
    cluster.kill_and_restart(STORAGE1);
    cluster.wait_up(STORAGE1);
    check(&big, kept);

    // Room again.
    fs::remove_file(&big).expect("unlink");
    until("space comes back", || cluster.disks[0].free() > 40 << 20);
    let (kept, why) = fill(&mnt.join("again"), 40);
    assert!(kept == 40 && why.is_none(), "{kept}: {why:?}");
    check(&mnt.join("again"), 40);
    all_alive(&mut cluster);
}

/// A target with no free block at all, not even for a tombstone.
#[test]
fn a_target_without_a_free_block_deletes() {
    let cluster = Separate::start_on(&[("s1a", 32)]);
    let (mnt, disk) = (cluster.mnt(), &cluster.disks[0]);
    for i in 0..20u64 {
        fs::write(mnt.join(format!("f{i}")), random_bytes(i, 2 << 20)).expect("write");
    }
    rustix::fs::sync();
    let ballast = disk.at.join("ballast");
    let mut size = 0;
    let file = File::create(&ballast).expect("create");
    for step in [1 << 20, 64 << 10, 4096, 1] {
        while file.write_all_at(&vec![1; step], size).and_then(|()| file.sync_all()).is_ok() {
            size += step as u64;
        }
    }
    assert_eq!(disk.free(), 0);
    for i in 0..20u64 {
        fs::remove_file(mnt.join(format!("f{i}"))).expect("unlink");
    }
    until("deleted chunks free their blocks", || disk.free() > 4 << 20);
    fs::remove_file(&ballast).expect("remove");
    fs::write(mnt.join("after"), random_bytes(3, 4 << 20)).expect("write");
}

/// Makes entries with large attributes until an error.
fn grow(dir: &Path, name: &str, max: usize) -> (usize, Option<io::Error>) {
    let value = random_bytes(1, 60_000);
    for i in 0..max {
        let path = dir.join(format!("{name}{i}"));
        let made = File::create(&path)
            .and_then(|_| setxattr(&path, "user.large", &value, XattrFlags::empty()).map_err(io::Error::from));
        if let Err(e) = made {
            return (i, Some(e));
        }
    }
    (max, None)
}

/// Reads, unlinks, renames and size changes work; what makes something gets ENOSPC.
fn goes_on(mnt: &Path, round: usize) {
    assert_eq!(fs::read(mnt.join("small")).expect("read"), b"before");
    let e = File::create(mnt.join("new")).expect_err("created on a full disk");
    assert!(is_full(&e), "{e}");
    let e = fs::create_dir(mnt.join("newdir")).expect_err("made on a full disk");
    assert!(is_full(&e), "{e}");
    assert!(fs::read_dir(mnt).expect("list").count() > 10);
    fs::remove_file(mnt.join(format!("g{round}"))).expect("unlink");
    fs::write(mnt.join("small"), b"before").expect("write to a file that is there");
    File::open(mnt.join("small")).and_then(|f| f.sync_all()).expect("fsync");
}

#[test]
fn a_full_metadata_disk() {
    let mut cluster = Separate::start_on(&[("meta", 48)]);
    let mnt = cluster.mnt();
    fs::write(mnt.join("small"), b"before").expect("write");
    let (made, why) = grow(&mnt, "g", 2000);
    let why = why.expect("48 MiB were never full");
    assert!(is_full(&why), "after {made}: {why}");
    assert!(made > 100, "{made}");
    goes_on(&mnt, 0);
    all_alive(&mut cluster);
    cluster.wait_log(META, "full");
    // A restart: nothing that was answered is lost.
    cluster.kill_and_restart(META);
    cluster.wait_up(META);
    for i in 1..made {
        assert!(mnt.join(format!("g{i}")).exists(), "g{i}");
    }
    // The start has moved the log into the database, which may have made room.
    let (more, why) = grow(&mnt, "i", 2000);
    let why = why.expect("48 MiB were never full");
    assert!(is_full(&why), "after {more}: {why}");
    goes_on(&mnt, 1);
    for name in (2..made).map(|i| format!("g{i}")).chain((0..more).map(|i| format!("i{i}"))) {
        fs::remove_file(mnt.join(name)).expect("unlink");
    }
    until("creating works again", || fs::write(mnt.join("new"), b"x").is_ok());
    let (made, why) = grow(&mnt, "h", 50);
    assert!(made == 50 && why.is_none(), "{made}: {why:?}");
    all_alive(&mut cluster);
}

/// Somebody else fills the metadata disk to the last block.
#[test]
fn a_metadata_disk_without_a_free_block() {
    let mut cluster = Separate::start_on(&[("meta", 48)]);
    let mnt = cluster.mnt();
    fs::write(mnt.join("small"), b"before").expect("write");
    let (made, _) = grow(&mnt, "g", 20);
    assert_eq!(made, 20);
    let ballast = cluster.disks[0].at.join("ballast");
    let file = File::create(&ballast).expect("create");
    let fill_up = || {
        let mut size = file.metadata().expect("size").len();
        for step in [1 << 20, 64 << 10, 4096, 1] {
            while file.write_all_at(&vec![1; step], size).and_then(|()| file.sync_all()).is_ok() {
                size += step as u64;
            }
        }
    };
    fill_up();
    // Flushes come and fail meanwhile, every half minute and when asked for.
    let end = Instant::now() + Duration::from_secs(35);
    let mut refused = 0;
    while Instant::now() < end {
        fill_up();
        assert_eq!(fs::read(mnt.join("small")).expect("read"), b"before");
        match File::create(mnt.join("new")) {
            Ok(_) => drop(fs::remove_file(mnt.join("new"))),
            Err(e) => {
                assert!(is_full(&e), "{e}");
                refused += 1;
            }
        }
        std::thread::sleep(Duration::from_millis(300));
    }
    assert!(refused > 50, "{refused}");
    all_alive(&mut cluster);
    drop(file);
    fs::remove_file(&ballast).expect("remove");
    until("creating works again", || File::create(mnt.join("new")).is_ok());
    let (made, why) = grow(&mnt, "h", 50);
    assert!(made == 50 && why.is_none(), "{made}: {why:?}");
    cluster.kill_and_restart(META);
    cluster.wait_up(META);
    for name in (0..20).map(|i| format!("g{i}")).chain((0..50).map(|i| format!("h{i}"))) {
        assert!(mnt.join(&name).exists(), "{name}");
    }
}
