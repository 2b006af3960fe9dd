//! The walk-through "Four machines" of README.md, word for word, on four machines that have nothing in common but a
//! network: each has its own addresses, host name, `/var/lib`, `/run`, `/root` and disks.

mod common;

use common::Daemon;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Where a machine has something of its own. `/usr/local/bin` and `/etc/hosts` are the same on all.
const OWN_DIRS: [&str; 4] = ["/var/lib", "/run", "/root", "/mnt"];

/// A shell command on the host; fails the test when it fails.
fn host(command: &str) -> String {
    output(Command::new("sh").args(["-ec", command]))
}

fn output(command: &mut Command) -> String {
    let out = command.output().expect("start");
    let (text, errors) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{command:?}: {}\n{errors}\n{text}", out.status);
    text.into_owned()
}

/// Four machines and the switch between them, all removed with the value.
struct Lab {
    dir: tempfile::TempDir,
    /// Per machine a process that does nothing but keep its namespaces.
    keepers: Vec<Child>,
    /// What runs, in the order it was started.
    daemons: Vec<Daemon>,
}

impl Lab {
    fn start() -> Lab {
        let mut lab =
            Lab { dir: tempfile::tempdir().expect("temporary directory"), keepers: Vec::new(), daemons: Vec::new() };
        let bin = lab.path("bin");
        fs::create_dir(&bin).expect("mkdir");
        fs::copy(env!("CARGO_BIN_EXE_beeswarm"), bin.join("beeswarm")).expect("install");
        let hosts: String = (1..=4).map(|n| format!("10.77.0.{n} imaging-0{n}\n")).collect();
        fs::write(lab.path("hosts"), format!("127.0.0.1 localhost\n{hosts}")).expect("hosts");

        // The bridge lies in a namespace of its own, so that nothing of the host's network changes.
        let switch = Lab::net(0);
        host(&format!(
            "ip netns add {switch}; ip -n {switch} link add br0 type bridge; ip -n {switch} link set br0 up"
        ));
        for n in 1..=4 {
            lab.add_machine(n, &switch);
        }
        lab
    }

    fn add_machine(&mut self, n: usize, switch: &str) {
        let net = Lab::net(n);
        host(&format!(
            "ip netns add {net}
             ip -n {switch} link add port{n} type veth peer name eth0 netns {net}
             ip -n {switch} link set port{n} master br0 up
             ip -n {net} address add 10.77.0.{n}/24 dev eth0
             ip -n {net} link set eth0 up
             ip -n {net} link set lo up"
        ));
        // A closed laboratory network: mgmt's machine, for one, has no way out.
        if n > 1 {
            host(&format!("ip -n {net} route add default via 10.77.0.254"));
        }
        let dir = self.dir.path().display();
        let mut script = format!("hostname imaging-0{n}; mount --bind {dir}/hosts /etc/hosts\n");
        script += &format!("mount --bind {dir}/bin /usr/local/bin\n");
        for own in OWN_DIRS {
            fs::create_dir_all(self.own(n, own)).expect("mkdir");
            script += &format!("mount --bind {} {own}\n", self.own(n, own).display());
        }
        script += "echo ready; exec sleep infinity";
        // Each of these programs becomes the next one, so that the child's pid is sleep's.
        let mut keeper = Command::new("ip")
            .args(["netns", "exec", &net, "unshare", "--mount", "--uts", "sh", "-ec", &script])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("start ip netns exec");
        let said = keeper.stdout.take().expect("piped");
        self.keepers.push(keeper);
        let mut line = String::new();
        BufReader::new(said).read_line(&mut line).expect("read");
        assert_eq!(line, "ready\n", "machine {n} does not come up");
    }

    /// Name of a machine's network namespace; 0 is the switch.
    fn net(n: usize) -> String {
        format!("beeswarm-{}-{n}", std::process::id())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Where a machine's own directory lies on the host.
    fn own(&self, n: usize, dir: &str) -> PathBuf {
        self.path(&format!("imaging-0{n}")).join(dir.trim_start_matches('/'))
    }

    /// `command` as it would be typed on machine `n`.
    fn on(&self, n: usize, command: &str) -> Command {
        let mut c = Command::new("nsenter");
        c.args(["-t", &self.keepers[n - 1].id().to_string(), "-m", "-n", "-u", "sh", "-ec", command])
            .env("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")
            .env("LC_ALL", "C")
            .env_remove("BEESWARM_RUN_DIR");
        c
    }

    /// Runs it to its end, half an hour at most.
    fn run(&self, n: usize, command: &str) -> String {
        output(self.on(n, &format!("timeout 1800 {command}")).stdin(Stdio::null()))
    }

    /// Starts a role and waits until it says that it is up.
    fn role(&mut self, n: usize, command: &str) {
        let log = self.path(&format!("{}-imaging-0{n}.log", self.daemons.len()));
        let daemon = Daemon::spawn(&mut self.on(n, &format!("exec {command}")), &log);
        self.daemons.push(daemon);
        self.daemons.last_mut().expect("pushed").wait_up();
    }

    /// What `command --json` prints on machine `n`, as a list.
    fn json(&self, n: usize, command: &str) -> Vec<serde_json::Value> {
        serde_json::from_str(&self.run(n, &format!("{command} --json"))).expect("a list in JSON")
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for d in &self.daemons {
                eprintln!("--- {}\n{}", d.log.display(), d.output());
            }
        }
        // Clients first, for they were started last; each is sent SIGTERM and after 30 s killed.
        while let Some(daemon) = self.daemons.pop() {
            drop(daemon);
        }
        for (i, keeper) in self.keepers.iter_mut().enumerate() {
            let pid = keeper.id().to_string();
            let _ = Command::new("nsenter")
                .args(["-t", &pid, "-m", "umount", "-l", "/mnt/beeswarm"])
                .stderr(Stdio::null())
                .status();
            if keeper.kill().and_then(|()| keeper.wait()).is_err() {
                eprintln!("the keeper of machine {} ({pid}) does not end", i + 1);
            }
        }
        for n in (0..=4).rev() {
            let _ = Command::new("ip").args(["netns", "del", &Lab::net(n)]).stderr(Stdio::null()).status();
        }
    }
}

/// A command that README.md has word for word; what it has after that is for the caller.
fn readme(command: &str) -> &str {
    assert!(include_str!("../README.md").contains(command), "README.md does not have `{command}`");
    command
}

/// Starts what the walk-through starts: mgmt, meta and a disk on the first machine, two disks on each other one, the
/// volume on the second and the third.
fn walk_through() -> Lab {
    let mut lab = Lab::start();
    lab.role(1, readme("beeswarm --role mgmt,meta -p /var/lib/beeswarm"));
    lab.run(1, readme("beeswarm cluster token > /root/join.token"));
    for n in 2..=4 {
        fs::copy(lab.own(1, "/root").join("join.token"), lab.own(n, "/root").join("join.token")).expect("copy");
    }
    for n in 1..=4 {
        fs::create_dir(lab.own(n, "/mnt/disk1")).expect("mkdir");
        let one = readme("beeswarm --role storage -m imaging-01 --join-token-file /root/join.token -p /mnt/disk1");
        if n == 1 {
            lab.role(n, one);
        } else {
            fs::create_dir(lab.own(n, "/mnt/disk2")).expect("mkdir");
            lab.role(n, readme(&format!("{one} -p /mnt/disk2")));
        }
    }
    for n in [2, 3] {
        lab.run(n, readme("mkdir -p /mnt/beeswarm"));
        lab.role(
            n,
            readme("beeswarm --role client -m imaging-01 --join-token-file /root/join.token --mount /mnt/beeswarm"),
        );
    }
    lab
}

/// Copies real directories of this machine below `to` until there are more than 5,000 files.
fn source_tree(to: &Path) {
    fs::create_dir(to).expect("mkdir");
    let home = std::env::var("HOME").unwrap_or_else(|_| "/root".into());
    let registry = format!("{home}/.cargo/registry/src");
    let mut files = 0;
    for dir in ["/usr/include", "/usr/share/doc", "/usr/lib/python3", &registry, "/usr/share"] {
        if files <= 5_000 && Path::new(dir).is_dir() {
            host(&format!("tar -C / -cf - {} | tar -C {} -xf -", &dir[1..], to.display()));
            files = host(&format!("find {} -type f | wc -l", to.display())).trim().parse().expect("a number");
        }
    }
    assert!(files > 5_000, "this machine has no tree of more than 5,000 files, only {files}");
}

/// Online storage nodes by name, each once.
fn online_storage(nodes: &[serde_json::Value]) -> Vec<String> {
    let mut names: Vec<String> = nodes
        .iter()
        .filter(|n| n["id"]["role"] == "storage" && n["reachability"] == "online")
        .map(|n| n["name"].as_str().expect("a name").to_string())
        .collect();
    names.sort();
    names
}

#[test]
fn walk_through_of_the_readme_gives_four_machines_one_volume() {
    let lab = walk_through();

    // A role is up before mgmt has its first report.
    let wanted = ["imaging-01", "imaging-02", "imaging-03", "imaging-04"];
    let end = Instant::now() + Duration::from_secs(30);
    while online_storage(&lab.json(1, "beeswarm node list")) != wanted && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(200));
    }
    for n in 1..=4 {
        assert_eq!(online_storage(&lab.json(n, "beeswarm node list")), wanted, "asked on machine {n}");
        let targets = lab.json(n, "beeswarm target list");
        assert_eq!(targets.len(), 7, "{targets:?}");
        for t in &targets {
            assert!(t["reachability"] == "online" && t["consistency"] == "good", "asked on machine {n}: {t}");
        }
        lab.run(n, "beeswarm df");
        lab.run(n, "beeswarm health check");
    }

    // 2 GiB written on one machine are the same bytes on both.
    let random = lab.path("random");
    host(&format!("head -c 2147483648 /dev/urandom > {}", random.display()));
    let sum = lab.run(2, &format!("sha256sum < {}", random.display()));
    lab.run(2, &format!("cp {} /mnt/beeswarm/random", random.display()));
    for n in [3, 2] {
        assert_eq!(lab.run(n, "sha256sum < /mnt/beeswarm/random"), sum, "read on machine {n}");
    }

    // A tree unpacked on one machine is the same tree on the other.
    let (tree, archive) = (lab.path("tree"), lab.path("tree.tar"));
    source_tree(&tree);
    host(&format!("tar -C {} --format=posix -cf {} .", tree.display(), archive.display()));
    lab.run(2, "mkdir /mnt/beeswarm/tree");
    let archive = File::open(&archive).expect("open");
    output(lab.on(2, "timeout 1800 tar -C /mnt/beeswarm/tree -xf -").stdin(archive));
    lab.run(3, &format!("diff -r --no-dereference {} /mnt/beeswarm/tree", tree.display()));
    // What diff does not compare: kind, mode, owner, time of change, and of all but directories links and size.
    let stat = r"\( -type d -printf '%P %y %m %U %G %T@\n' \) -o -printf '%P %y %m %U %G %T@ %n %s %l\n'";
    let (here, there) = (lab.path("tree.stat"), lab.path("volume.stat"));
    lab.run(3, &format!("find {} {stat} | sort > {}", tree.display(), here.display()));
    lab.run(3, &format!("find /mnt/beeswarm/tree {stat} | sort > {}", there.display()));
    lab.run(3, &format!("diff {} {}", here.display(), there.display()));

    // All four machines hold a part of all this.
    for n in 1..=4 {
        let kib: u64 =
            host(&format!("du -sk {} | cut -f1", lab.own(n, "/mnt/disk1").display())).trim().parse().expect("a number");
        assert!(kib > 1024, "the disk of machine {n} has {kib} KiB only");
    }
}
