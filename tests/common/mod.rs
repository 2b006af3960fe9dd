//! Starts real clusters of real processes with real mounts, and takes them down whatever happens.

#![allow(dead_code)] // each test binary uses a part of it

use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A free UDP port on loopback (free a moment ago; the tests run one at a time).
pub fn free_port() -> u16 {
    UdpSocket::bind("127.0.0.1:0").expect("bind").local_addr().expect("address").port()
}

/// A process that is ended with its value.
pub struct Daemon {
    child: Child,
    /// Its output.
    pub log: PathBuf,
}

impl Daemon {
    /// Starts `beeswarm` with these arguments, output to `log`.
    pub fn start(args: &[&str], log: &Path, run_dir: &Path) -> Daemon {
        let mut command = Command::new(env!("CARGO_BIN_EXE_beeswarm"));
        command.args(args).env("BEESWARM_RUN_DIR", run_dir);
        Daemon::spawn(&mut command, log)
    }

    /// Starts this command, output to `log`.
    pub fn spawn(command: &mut Command, log: &Path) -> Daemon {
        let out = File::options().create(true).append(true).open(log).expect("log file");
        let child = command
            .stdin(Stdio::null())
            .stdout(out.try_clone().expect("clone"))
            .stderr(out)
            .spawn()
            .expect("start beeswarm");
        Daemon { child, log: log.to_path_buf() }
    }

    /// Waits until it says that it is up.
    pub fn wait_up(&mut self) {
        let end = Instant::now() + Duration::from_secs(30);
        while !self.output().contains("is up:") {
            if let Some(code) = self.ended() {
                panic!("ended with {code}:\n{}", self.output());
            }
            assert!(Instant::now() < end, "not up after 30 s:\n{}", self.output());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// kill -9.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// SIGTERM; the exit code, or none when it had to be killed after 30 s.
    pub fn stop(&mut self) -> Option<i32> {
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::TERM);
        }
        let end = Instant::now() + Duration::from_secs(30);
        while Instant::now() < end {
            if let Ok(Some(status)) = self.child.try_wait() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        self.kill();
        None
    }

    /// Has it ended by itself?
    pub fn ended(&mut self) -> Option<i32> {
        self.child.try_wait().ok().flatten().and_then(|s| s.code())
    }

    /// What it printed so far.
    pub fn output(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.child.try_wait().ok().flatten().is_none() {
            self.stop();
        }
    }
}

/// Is this directory a mount point of ours?
pub fn is_mounted(dir: &Path) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    mounts.lines().any(|l| l.split(' ').nth(1) == dir.to_str())
}

/// Waits until it is mounted.
pub fn wait_mounted(dir: &Path, daemon: &mut Daemon) {
    let end = Instant::now() + Duration::from_secs(30);
    // After kill -9 the dead mount is still in the table until the new client has replaced it.
    while !is_mounted(dir) || std::fs::metadata(dir).is_err() {
        if let Some(code) = daemon.ended() {
            panic!("beeswarm ended with {code}:\n{}", daemon.output());
        }
        assert!(Instant::now() < end, "not mounted after 30 s:\n{}", daemon.output());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A whole cluster in one process, mounted.
pub struct AllInOne {
    daemon: Option<Daemon>,
    /// Its port.
    pub port: u16,
    dir: tempfile::TempDir,
}

impl AllInOne {
    /// Starts one with four targets.
    pub fn start() -> AllInOne {
        let dir = tempfile::tempdir().expect("temporary directory");
        let mut cluster = AllInOne { daemon: None, port: free_port(), dir };
        std::fs::create_dir(cluster.path("mnt")).expect("mkdir");
        std::fs::create_dir(cluster.path("data")).expect("mkdir");
        cluster.restart();
        cluster
    }

    /// A path below the cluster's temporary directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The mount point.
    pub fn mnt(&self) -> PathBuf {
        self.path("mnt")
    }

    /// Starts the process again on the same state.
    pub fn restart(&mut self) {
        let (data, mnt) = (self.path("data"), self.mnt());
        let mut daemon = Daemon::start(
            &[
                "--role",
                "all",
                "-p",
                data.to_str().expect("utf-8"),
                "--mount",
                mnt.to_str().expect("utf-8"),
                "--targets",
                "4",
                "--listen",
                &format!("127.0.0.1:{}", self.port),
            ],
            &self.path("all.log"),
            &self.path("run"),
        );
        wait_mounted(&mnt, &mut daemon);
        self.daemon = Some(daemon);
    }

    /// kill -9 of the whole cluster.
    pub fn kill(&mut self) {
        if let Some(mut d) = self.daemon.take() {
            d.kill();
        }
    }

    /// SIGTERM; the exit code.
    pub fn stop(&mut self) -> Option<i32> {
        self.daemon.take().and_then(|mut d| d.stop())
    }

    /// A second client, joined with the token of the first.
    pub fn second_client(&self) -> (Daemon, PathBuf) {
        let mnt = self.path("mnt2");
        let state = self.path("client2");
        std::fs::create_dir_all(&mnt).expect("mkdir");
        std::fs::create_dir_all(&state).expect("mkdir");
        let token = self.path("data").join("join.token");
        let mut daemon = Daemon::start(
            &[
                "--role",
                "client",
                "-m",
                &format!("127.0.0.1:{}", self.port),
                "--join-token-file",
                token.to_str().expect("utf-8"),
                "--mount",
                mnt.to_str().expect("utf-8"),
                "-p",
                state.to_str().expect("utf-8"),
            ],
            &self.path("client2.log"),
            &self.path("run2"),
        );
        wait_mounted(&mnt, &mut daemon);
        (daemon, mnt)
    }

    /// Runs an operator's command; standard output. Fails the test when the command fails.
    pub fn command(&self, args: &[&str]) -> String {
        let out = Command::new(env!("CARGO_BIN_EXE_beeswarm"))
            .args(args)
            .env("BEESWARM_RUN_DIR", self.path("run"))
            .output()
            .expect("run beeswarm");
        assert!(
            out.status.success(),
            "beeswarm {args:?}: {}\n{}",
            String::from_utf8_lossy(&out.stderr),
            String::from_utf8_lossy(&out.stdout)
        );
        String::from_utf8_lossy(&out.stdout).into_owned()
    }
}

impl Drop for AllInOne {
    fn drop(&mut self) {
        if let Some(d) = &self.daemon
            && std::thread::panicking()
        {
            eprintln!("--- output of the cluster\n{}", d.output());
        }
        self.stop();
        for name in ["mnt", "mnt2"] {
            let mnt = self.path(name);
            if is_mounted(&mnt) {
                let _ = rustix::mount::unmount(&mnt, rustix::mount::UnmountFlags::DETACH);
            }
        }
    }
}

/// Pseudo-random bytes from a seed, the same on each run.
pub fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.wrapping_mul(0x2545_F491_4F6C_DD1D).to_le_bytes());
    }
    out.truncate(len);
    out
}

/// An ext4 of its own on a loop device; unmounted with its value. The image lies beside the mount point.
pub struct LoopDisk {
    /// The mount point.
    pub at: PathBuf,
    image: PathBuf,
}

/// Runs a command of the system; fails the test when it fails.
pub fn system(program: &str, args: &[&str]) {
    let out = Command::new(program).args(args).output().unwrap_or_else(|e| panic!("{program}: {e}"));
    assert!(out.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&out.stderr));
}

impl LoopDisk {
    /// Makes one and mounts it on this directory.
    pub fn make(at: &Path, mib: u64) -> LoopDisk {
        let disk = LoopDisk { at: at.to_path_buf(), image: at.with_extension("img") };
        File::create(&disk.image).and_then(|f| f.set_len(mib << 20)).expect("image");
        // No blocks kept for root: what is free is what can be written.
        system("mkfs.ext4", &["-q", "-m", "0", "-F", disk.image.to_str().expect("utf-8")]);
        disk.mount();
        disk
    }

    /// Mounts it (again). The loop device goes away with the mount.
    pub fn mount(&self) {
        system("mount", &["-o", "loop", self.image.to_str().expect("utf-8"), self.at.to_str().expect("utf-8")]);
    }

    /// Unmounts it.
    pub fn unmount(&self) {
        system("umount", &[self.at.to_str().expect("utf-8")]);
    }

    /// Free bytes.
    pub fn free(&self) -> u64 {
        let s = rustix::fs::statvfs(&self.at).expect("statvfs");
        s.f_bavail * s.f_frsize
    }
}

impl Drop for LoopDisk {
    fn drop(&mut self) {
        if is_mounted(&self.at) {
            let _ = rustix::mount::unmount(&self.at, rustix::mount::UnmountFlags::DETACH);
        }
    }
}

/// A cluster of one process per role on loopback: mgmt, meta, two storage nodes of two targets each, a client.
pub struct Separate {
    dir: tempfile::TempDir,
    ports: [u16; 4],
    /// mgmt, meta, storage 1, storage 2, client.
    pub daemons: [Option<Daemon>; 5],
    /// Disks under some of its directories; unmounted after the processes have ended.
    pub disks: Vec<LoopDisk>,
}

/// Index into `Separate::daemons`.
pub const MGMT: usize = 0;
/// Index into `Separate::daemons`.
pub const META: usize = 1;
/// Index into `Separate::daemons`.
pub const STORAGE1: usize = 2;
/// Index into `Separate::daemons`.
pub const STORAGE2: usize = 3;
/// Index into `Separate::daemons`.
pub const CLIENT: usize = 4;

impl Separate {
    /// Starts all five; returns when mounted and all four targets are there.
    pub fn start() -> Separate {
        Separate::start_on(&[])
    }

    /// The same, with disks of so many MiB under these of its directories.
    pub fn start_on(disks: &[(&str, u64)]) -> Separate {
        let dir = tempfile::tempdir().expect("temporary directory");
        for d in ["mgmt", "meta", "s1a", "s1b", "s2a", "s2b", "client", "mnt"] {
            std::fs::create_dir(dir.path().join(d)).expect("mkdir");
        }
        let ports = [free_port(), free_port(), free_port(), free_port()];
        let mut cluster = Separate { dir, ports, daemons: [None, None, None, None, None], disks: Vec::new() };
        for (name, mib) in disks {
            let disk = LoopDisk::make(&cluster.path(name), *mib);
            cluster.disks.push(disk);
        }
        for which in [MGMT, META, STORAGE1, STORAGE2] {
            cluster.start_one(which);
            cluster.wait_up(which);
        }
        cluster.start_one(CLIENT);
        let mnt = cluster.mnt();
        wait_mounted(&mnt, cluster.daemons[CLIENT].as_mut().expect("client"));
        cluster
    }

    /// A path below the cluster's temporary directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The mount point.
    pub fn mnt(&self) -> PathBuf {
        self.path("mnt")
    }

    /// mgmt's address.
    pub fn mgmt(&self) -> String {
        format!("127.0.0.1:{}", self.ports[MGMT])
    }

    /// The port of a server.
    pub fn port(&self, which: usize) -> u16 {
        self.ports[which]
    }

    /// SIGTERM; it must end in order.
    pub fn stop_one(&mut self, which: usize) {
        let mut daemon = self.daemons[which].take().expect("started");
        assert_eq!(daemon.stop(), Some(0), "{}", daemon.output());
    }

    /// What a process has printed so far.
    pub fn log(&self, which: usize) -> String {
        self.daemons[which].as_ref().expect("started").output()
    }

    /// Waits until a process has printed this.
    pub fn wait_log(&self, which: usize, text: &str) {
        let end = Instant::now() + Duration::from_secs(20);
        while !self.log(which).contains(text) {
            assert!(Instant::now() < end, "never said '{text}':\n{}", self.log(which));
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Runs an operator's command; it must succeed.
    pub fn command(&self, args: &[&str]) {
        let (code, output) = self.run(args);
        assert_eq!(code, Some(0), "beeswarm {args:?}: {output}");
    }

    /// Runs `beeswarm` with these arguments to its end (50 s at most); exit code and standard error.
    pub fn run(&self, args: &[&str]) -> (Option<i32>, String) {
        let out = Command::new("timeout")
            .args(["50", env!("CARGO_BIN_EXE_beeswarm")])
            .args(args)
            .env("BEESWARM_RUN_DIR", self.path("run"))
            .output()
            .expect("run beeswarm");
        let both = [out.stderr, out.stdout].concat();
        (out.status.code(), String::from_utf8_lossy(&both).into_owned())
    }

    /// Its join token file, made by `beeswarm cluster token`.
    pub fn token(&self) -> PathBuf {
        let file = self.path("token");
        if !file.exists() {
            let out = Command::new(env!("CARGO_BIN_EXE_beeswarm"))
                .args(["cluster", "token"])
                .env("BEESWARM_RUN_DIR", self.path("run"))
                .output()
                .expect("run beeswarm");
            assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
            std::fs::write(&file, out.stdout).expect("token file");
        }
        file
    }

    /// Starts one process (again).
    pub fn start_one(&mut self, which: usize) {
        let p = |n: &str| self.path(n).to_str().expect("utf-8").to_string();
        let mut args: Vec<String> = match which {
            MGMT => vec!["--role".into(), "mgmt".into(), "-p".into(), p("mgmt")],
            META => vec!["--role".into(), "meta".into(), "-p".into(), p("meta")],
            STORAGE1 => vec!["--role".into(), "storage".into(), "-p".into(), p("s1a"), "-p".into(), p("s1b")],
            STORAGE2 => vec!["--role".into(), "storage".into(), "-p".into(), p("s2a"), "-p".into(), p("s2b")],
            _ => vec!["--role".into(), "client".into(), "-p".into(), p("client"), "--mount".into(), p("mnt")],
        };
        if which != CLIENT {
            args.extend(["--listen".into(), format!("127.0.0.1:{}", self.ports[which])]);
        }
        if which != MGMT {
            let token = self.token().to_str().expect("utf-8").to_string();
            args.extend(["-m".into(), self.mgmt(), "--join-token-file".into(), token]);
        }
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let log = self.path(["mgmt.log", "meta.log", "s1.log", "s2.log", "client.log"][which]);
        self.daemons[which] = Some(Daemon::start(&args, &log, &self.path("run")));
    }

    /// Waits until it says that it is up.
    pub fn wait_up(&mut self, which: usize) {
        self.daemons[which].as_mut().expect("started").wait_up();
    }

    /// kill -9, then start again.
    pub fn kill_and_restart(&mut self, which: usize) {
        if let Some(mut d) = self.daemons[which].take() {
            d.kill();
        }
        self.start_one(which);
        if which == CLIENT {
            let mnt = self.mnt();
            // The dead mount is still in the table until the new client has replaced it.
            let end = Instant::now() + Duration::from_secs(30);
            while std::fs::metadata(&mnt).is_err() || !is_mounted(&mnt) {
                let d = self.daemons[CLIENT].as_mut().expect("started");
                assert!(d.ended().is_none() && Instant::now() < end, "client does not come back:\n{}", d.output());
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }
}

impl Drop for Separate {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for d in self.daemons.iter().flatten() {
                eprintln!("--- {}\n{}", d.log.display(), d.output());
            }
        }
        for which in [CLIENT, STORAGE1, STORAGE2, META, MGMT] {
            if let Some(mut d) = self.daemons[which].take() {
                d.stop();
            }
        }
        let mnt = self.mnt();
        if is_mounted(&mnt) {
            let _ = rustix::mount::unmount(&mnt, rustix::mount::UnmountFlags::DETACH);
        }
    }
}
