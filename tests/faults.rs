//! kill -9 of each role, under a streaming write and under a metadata storm: what was answered stays.

mod common;

use common::{CLIENT, META, MGMT, STORAGE1, STORAGE2, Separate, random_bytes};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Writes files of 1 MiB, fsyncs each, and remembers those whose fsync was answered.
fn stream(dir: &Path, round: u64, stop: &AtomicBool) -> Vec<(PathBuf, u64)> {
    let mut synced = Vec::new();
    for i in 0..200 {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let path = dir.join(format!("data-{round}-{i}"));
        let seed = round * 1000 + i;
        let done = File::create(&path).and_then(|f| {
            f.write_all_at(&random_bytes(seed, 1 << 20), 0)?;
            f.sync_all()
        });
        if done.is_ok() {
            synced.push((path, seed));
        }
    }
    synced
}

/// Makes directories and files, renames and unlinks; remembers names that must be there and names that must not.
fn storm(dir: &Path, round: u64, stop: &AtomicBool) -> (Vec<PathBuf>, Vec<PathBuf>) {
    let (mut there, mut gone) = (Vec::new(), Vec::new());
    for i in 0..2000 {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let name = dir.join(format!("m-{round}-{i}"));
        let to = dir.join(format!("r-{round}-{i}"));
        if File::create(&name).is_err() {
            continue;
        }
        match i % 3 {
            0 => there.push(name),
            1 => match fs::rename(&name, &to) {
                Ok(()) => {
                    there.push(to);
                    gone.push(name);
                }
                Err(_) => continue,
            },
            _ => {
                if fs::remove_file(&name).is_ok() {
                    gone.push(name);
                }
            }
        }
    }
    (there, gone)
}

#[test]
fn killing_each_role_under_load_loses_nothing_that_was_answered() {
    let mut cluster = Separate::start();
    let mnt = cluster.mnt();
    let mut synced = Vec::new();
    let (mut there, mut gone) = (Vec::new(), Vec::new());
    for (round, victim) in [MGMT, META, STORAGE1, STORAGE2, META, CLIENT, STORAGE1].into_iter().enumerate() {
        let stop = Arc::new(AtomicBool::new(false));
        let round = round as u64;
        let workers = {
            let (m1, s1, m2, s2) = (mnt.clone(), stop.clone(), mnt.clone(), stop.clone());
            (std::thread::spawn(move || stream(&m1, round, &s1)), std::thread::spawn(move || storm(&m2, round, &s2)))
        };
        std::thread::sleep(Duration::from_millis(700));
        cluster.kill_and_restart(victim);
        std::thread::sleep(Duration::from_millis(1500));
        stop.store(true, Ordering::Relaxed);
        synced.extend(workers.0.join().expect("stream"));
        let (t, g) = workers.1.join().expect("storm");
        assert!(!t.is_empty(), "round {round}: nothing was answered at all");
        there.extend(t);
        gone.extend(g);
        for (path, seed) in &synced {
            let got = fs::read(path).unwrap_or_else(|e| panic!("victim {victim}: {} was fsynced: {e}", path.display()));
            assert!(got == random_bytes(*seed, 1 << 20), "victim {victim}: {} has other bytes", path.display());
        }
        for path in &there {
            assert!(path.exists(), "victim {victim}: {} was answered and is gone", path.display());
        }
        for path in &gone {
            assert!(!path.exists(), "victim {victim}: {} was removed and is back", path.display());
        }
    }
    assert!(synced.len() > 20, "only {} files were fsynced", synced.len());
}

#[test]
fn server_down_lets_a_signal_and_umount_through() {
    let mut cluster = Separate::start();
    let mnt = cluster.mnt();
    fs::write(mnt.join("f"), b"x").expect("write");
    if let Some(mut d) = cluster.daemons[META].take() {
        d.kill();
    }
    let mut child = std::process::Command::new("cat").arg(mnt.join("f")).spawn().expect("cat");
    std::thread::sleep(Duration::from_secs(1));
    assert!(child.try_wait().expect("wait").is_none(), "the call waits for the server");
    let pid = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw).expect("pid");
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("kill");
    let end = std::time::Instant::now() + Duration::from_secs(10);
    while child.try_wait().expect("wait").is_none() {
        assert!(std::time::Instant::now() < end, "Ctrl-C does not end a waiting call");
        std::thread::sleep(Duration::from_millis(50));
    }
    let umount = std::process::Command::new("timeout").args(["20", "umount"]).arg(&mnt).status().expect("umount");
    assert!(umount.success(), "umount while the server is down: {umount}");
}

#[test]
fn wrong_joins_and_wrong_directories_are_refused_with_a_reason() {
    let cluster = Separate::start();
    let beeswarm = |args: &[&str]| {
        let out = std::process::Command::new("timeout")
            .arg("20")
            .arg(env!("CARGO_BIN_EXE_beeswarm"))
            .args(args)
            .env("BEESWARM_RUN_DIR", cluster.path("run-other"))
            .output()
            .expect("run");
        (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    let p = |n: &str| cluster.path(n).to_str().expect("utf-8").to_string();
    fs::create_dir(cluster.path("new")).expect("mkdir");
    let (code, err) = beeswarm(&["--role", "storage", "-p", &p("new"), "-m", &cluster.mgmt()]);
    assert!(code == Some(1) && err.contains("token"), "without a token: {code:?} {err}");
    let (code, err) = beeswarm(&["--role", "storage", "-p", &p("missing"), "-m", &cluster.mgmt()]);
    assert!(code == Some(1) && err.contains("missing"), "missing directory: {code:?} {err}");
    let token = p("token");
    let args = ["--role", "storage", "-p", &p("s1a"), "-m", &cluster.mgmt(), "--join-token-file", &token];
    let (code, err) = beeswarm(&args);
    assert!(code == Some(1) && err.contains("process"), "second process on a directory: {code:?} {err}");
    fs::write(cluster.path("new").join("thesis.tex"), "x").expect("write");
    let args = ["--role", "storage", "-p", &p("new"), "-m", &cluster.mgmt(), "--join-token-file", &token];
    let (code, err) = beeswarm(&args);
    assert!(code == Some(1) && err.contains("empty"), "a directory with other files: {code:?} {err}");
    let (code, err) = beeswarm(&["--role", "stroage", "-p", &p("new")]);
    assert!(code.is_some_and(|c| c != 0) && err.contains("stroage"), "unknown role: {code:?} {err}");
    let _ = CLIENT;
}
