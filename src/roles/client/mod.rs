//! The client: mounts the volume. `fuse` decodes and replies, `vfs` holds all operations and knows nothing of FUSE.

mod data;
mod fuse;
mod handles;
mod interrupt;
mod meta;
mod vfs;

use crate::base::{
    ids::{ClientInstance, InodeId},
    start::StartError,
};
use crate::net::cluster::Cluster;
use fuse::FuseFs;
use fuser::{Config, MountOption, Session, SessionACL};
use handles::Handles;
use meta::MetaSession;
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::task::TaskTracker;
use vfs::Vfs;

/// How long an unmount waits for operations in flight, and for the meta server.
const UNMOUNT_WAIT: Duration = Duration::from_secs(10);
/// Threads that read requests from the kernel: they only decode.
const FUSE_THREADS_MAX: usize = 8;

/// How to mount.
#[derive(Clone, Copy, Debug)]
pub struct MountOptions {
    /// How long an operation waits for a server that is away before it fails.
    pub wait: Duration,
    /// Refuse all changes.
    pub read_only: bool,
    /// Let all users in, not only the one who mounts.
    pub allow_other: bool,
}

/// A mounted volume.
#[derive(Debug)]
pub struct Client {
    mountpoint: PathBuf,
    session: Arc<MetaSession>,
    keep_alive: JoinHandle<()>,
    tasks: TaskTracker,
    ended: watch::Receiver<bool>,
}

impl Client {
    /// Opens a session at the meta server and mounts on a directory that [`check_mount_point`] has looked at.
    pub async fn mount(
        cluster: Arc<Cluster>,
        mountpoint: PathBuf,
        options: MountOptions,
    ) -> Result<Client, StartError> {
        let what = cannot_mount(&mountpoint);
        let handles = Arc::new(Handles::default());
        let no_server = |e| {
            StartError::new(
                what.clone(),
                format!("the meta server gives no session: {e}"),
                "Start mgmt, meta and storage, look into the meta server's log, and try again.",
            )
        };
        let session = MetaSession::open(cluster.clone(), ClientInstance::random(), handles.clone(), options.wait)
            .await
            .map_err(no_server)?;
        let vfs = Vfs::new(cluster, session.clone(), handles, options.wait);
        if let Err(e) = vfs.getattr(InodeId::ROOT).await {
            session.close(UNMOUNT_WAIT).await;
            return Err(no_server(e));
        }
        let tasks = TaskTracker::new();
        let fs = FuseFs::new(vfs, Handle::current(), tasks.clone());
        // At the last moment: until a dead mount is replaced, programs get errors; without it they would write below it.
        let mountpoint = match prepare(&mountpoint, true).await {
            Ok(at) => at,
            Err(e) => {
                session.close(UNMOUNT_WAIT).await;
                return Err(e);
            }
        };
        let at = mountpoint.clone();
        let mounted = tokio::task::spawn_blocking(move || Session::new(fs, &at, &config(options))).await;
        let fuse = match mounted {
            Ok(Ok(fuse)) => fuse,
            failed => {
                session.close(UNMOUNT_WAIT).await;
                let why = match failed {
                    Ok(Err(e)) => e.to_string(),
                    _ => "the mount was broken off".to_owned(),
                };
                return Err(StartError::new(
                    what,
                    why,
                    "Mount as root, with /dev/fuse in place (modprobe fuse); in a container it needs --device /dev/fuse and CAP_SYS_ADMIN.",
                ));
            }
        };
        let (tx, ended) = watch::channel(false);
        let thread = std::thread::Builder::new().name("fuse".to_owned()).spawn(move || {
            if let Err(e) = fuse.run() {
                tracing::error!("the connection to the kernel broke: {e}");
            }
            tx.send_replace(true);
        });
        if let Err(e) = thread {
            // The closure, and with it the mount, is gone.
            session.close(UNMOUNT_WAIT).await;
            return Err(StartError::new(what, e, "Raise the limit on threads."));
        }
        let keep_alive = tokio::spawn(session.clone().keep_alive());
        Ok(Client { mountpoint, session, keep_alive, tasks, ended })
    }

    /// Resolves when somebody has unmounted the volume.
    pub async fn ended(&self) {
        // An error means that the thread is gone, which is an end as well.
        let _ = self.ended.clone().wait_for(|e| *e).await;
    }

    /// Unmounts (lazily if it is busy), waits a bounded time for operations in flight, and ends the session.
    pub async fn unmount(self) {
        if !*self.ended.borrow() {
            let at = self.mountpoint.clone();
            let result = tokio::task::spawn_blocking(move || unmount_path(&at)).await;
            if let Ok(Err(e)) = result {
                tracing::warn!("cannot unmount {}: {e}", self.mountpoint.display());
            }
            if tokio::time::timeout(UNMOUNT_WAIT, self.ended()).await.is_err() {
                tracing::warn!("programs still use {}; it goes away when they end", self.mountpoint.display());
            }
        }
        self.tasks.close();
        if tokio::time::timeout(UNMOUNT_WAIT, self.tasks.wait()).await.is_err() {
            tracing::warn!("some operations did not end in time");
        }
        self.keep_alive.abort();
        self.session.close(UNMOUNT_WAIT).await;
    }
}

fn unmount_path(at: &Path) -> Result<(), Errno> {
    match rustix::mount::unmount(at, UnmountFlags::NOFOLLOW) {
        Err(Errno::BUSY) => {
            tracing::warn!("{} is busy: detaching it", at.display());
            rustix::mount::unmount(at, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
        }
        // Somebody else was faster.
        Err(Errno::INVAL | Errno::NOENT) => Ok(()),
        other => other,
    }
}

fn cannot_mount(at: &Path) -> String {
    format!("cannot mount on {}", at.display())
}

/// Checks the mount point, before anything is asked of the cluster: an existing directory that beeswarm is not mounted
/// on already, or a dead mount (its process was killed).
pub async fn check_mount_point(at: &Path) -> Result<(), StartError> {
    prepare(at, false).await.map(drop)
}

/// The same; a dead mount is detached if asked for. The path without symbolic links.
async fn prepare(at: &Path, detach: bool) -> Result<PathBuf, StartError> {
    let what = cannot_mount(at);
    let fail = |e: &dyn std::fmt::Display, todo: &str| StartError::new(what.as_str(), e, todo);
    let path = at.to_path_buf();
    let checked = tokio::task::spawn_blocking(move || {
        for _ in 0..8 {
            match std::fs::metadata(&path) {
                Err(e) if e.raw_os_error() == Some(Errno::NOTCONN.raw_os_error()) => {
                    if !detach {
                        return Ok(path);
                    }
                    tracing::warn!("{} is a dead mount: detaching it", path.display());
                    rustix::mount::unmount(&path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
                        .map_err(std::io::Error::from)?;
                }
                Err(e) => return Err(e),
                Ok(m) if m.is_dir() => {
                    let path = path.canonicalize()?;
                    return if holds_our_mount(&path)? { Err(Errno::BUSY.into()) } else { Ok(path) };
                }
                Ok(_) => return Err(Errno::NOTDIR.into()),
            }
        }
        Err(Errno::NOTCONN.into())
    })
    .await;
    match checked {
        Ok(Ok(path)) => Ok(path),
        Ok(Err(e)) if e.kind() == std::io::ErrorKind::NotFound => {
            Err(fail(&"there is no such directory", &format!("Make it: mkdir -p {}", at.display())))
        }
        Ok(Err(e)) if e.kind() == std::io::ErrorKind::ResourceBusy => Err(fail(
            &"beeswarm is mounted there already",
            &format!("Use that mount, or end it first: umount {}", at.display()),
        )),
        Ok(Err(e)) => Err(fail(
            &e,
            &format!("Give an existing directory; a dead mount goes away with: umount -l {}", at.display()),
        )),
        Err(e) => Err(fail(&e, "")),
    }
}

/// Whether the last mount on this very directory is one of ours.
fn holds_our_mount(path: &Path) -> std::io::Result<bool> {
    // Fields of proc_pid_mountinfo(5): the mount point is the fifth; after a lone `-` the type, escaped in octal.
    let escaped = path.to_string_lossy().replace('\\', "\\134").replace(' ', "\\040");
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    let last = mounts.lines().rfind(|line| line.split(' ').nth(4) == Some(escaped.as_str()));
    // Without the mount helper the kernel is not told the subtype: then the source, which we set, tells.
    let ours = |rest: &str| rest.starts_with("fuse.beeswarm ") || rest.starts_with("fuse beeswarm ");
    Ok(last.is_some_and(|line| line.split(" - ").nth(1).is_some_and(ours)))
}

fn config(options: MountOptions) -> Config {
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName("beeswarm".to_owned()),
        MountOption::Subtype("beeswarm".to_owned()),
        MountOption::DefaultPermissions,
        if options.read_only { MountOption::RO } else { MountOption::RW },
    ];
    if rustix::process::geteuid().is_root() {
        config.mount_options.extend([MountOption::Suid, MountOption::Dev]);
    }
    config.acl = if options.allow_other { SessionACL::All } else { SessionACL::Owner };
    config.n_threads = Some(std::thread::available_parallelism().map_or(2, usize::from).clamp(2, FUSE_THREADS_MAX));
    config.clone_fd = true;
    config
}
