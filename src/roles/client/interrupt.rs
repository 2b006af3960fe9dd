//! Ctrl-C during a long wait. fuser does not pass FUSE_INTERRUPT on, so the state of the calling thread is read from
//! `/proc/<tid>/status`.

use std::time::Duration;

/// How long a request runs before its caller is watched.
const PATIENCE: Duration = Duration::from_millis(300);
/// Time between two looks.
const INTERVAL: Duration = Duration::from_millis(200);

const fn bit(signal: u32) -> u64 {
    1 << (signal - 1)
}

/// STOP, TSTP, TTIN, TTOU: they do not end a system call.
const STOPS: u64 = bit(19) | bit(20) | bit(21) | bit(22);
/// HUP, INT, QUIT, TERM: a person wants the program to stop, even if it catches them.
const WANTED: u64 = bit(1) | bit(2) | bit(3) | bit(15);

/// What `/proc/<pid>/status` says about signals and groups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcStatus {
    /// Pending for the thread or its process.
    pub pending: u64,
    /// Blocked.
    pub blocked: u64,
    /// Ignored.
    pub ignored: u64,
    /// Caught by a handler.
    pub caught: u64,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

impl ProcStatus {
    /// Parses the text; unknown or damaged lines count as empty.
    pub fn parse(text: &str) -> Self {
        let mut status = Self::default();
        for line in text.lines() {
            let Some((key, value)) = line.split_once(':') else { continue };
            let hex = || u64::from_str_radix(value.trim(), 16).unwrap_or(0);
            match key {
                "SigPnd" | "ShdPnd" => status.pending |= hex(),
                "SigBlk" => status.blocked = hex(),
                "SigIgn" => status.ignored = hex(),
                "SigCgt" => status.caught = hex(),
                "Groups" => status.groups = value.split_whitespace().filter_map(|g| g.parse().ok()).collect(),
                _ => {}
            }
        }
        status
    }

    /// Is a signal waiting that ends the program, or with which a person asks it to end?
    pub fn interrupted(&self) -> bool {
        let deliverable = self.pending & !self.blocked & !self.ignored & !STOPS;
        deliverable & (!self.caught | WANTED) != 0
    }
}

/// Reads the status of a thread or process.
pub fn status_of(pid: u32) -> Option<ProcStatus> {
    let text = std::fs::read(format!("/proc/{pid}/status")).ok()?;
    Some(ProcStatus::parse(&String::from_utf8_lossy(&text)))
}

/// Supplementary groups of a caller; none for the superuser, who needs none.
pub fn groups_of(pid: u32, uid: u32) -> Vec<u32> {
    if uid == 0 || pid == 0 {
        return Vec::new();
    }
    status_of(pid).map(|s| s.groups).unwrap_or_default()
}

/// Returns when the caller waits with a pending signal; for the kernel itself (pid 0), never.
pub async fn interrupted(pid: u32) {
    if pid == 0 {
        return std::future::pending().await;
    }
    tokio::time::sleep(PATIENCE).await;
    loop {
        // A thread that cannot be seen (another pid namespace) is never interrupted.
        if status_of(pid).is_some_and(|s| s.interrupted()) {
            return;
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "Name:\tcat\nGroups:\t4 24 1000 \nSigQ:\t0/31\nSigPnd:\t0000000000000000\nShdPnd:\t0000000000000002\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\nSigCgt:\t0000000000000000\n";

    #[test]
    fn a_pending_interrupt_is_seen() {
        let s = ProcStatus::parse(TEXT);
        assert_eq!(s.groups, [4, 24, 1000]);
        assert!(s.interrupted());
    }

    #[test]
    fn blocked_ignored_stopping_and_caught_signals_do_not_interrupt() {
        let s = ProcStatus::parse(TEXT);
        assert!(!ProcStatus { blocked: 2, ..s.clone() }.interrupted());
        assert!(!ProcStatus { ignored: 2, ..s.clone() }.interrupted());
        assert!(!ProcStatus { pending: bit(20), ..s.clone() }.interrupted());
        assert!(!ProcStatus { pending: bit(17), caught: bit(17), ..s.clone() }.interrupted());
        assert!(ProcStatus { caught: 2, ..s.clone() }.interrupted(), "a caught Ctrl-C still interrupts");
        assert!(ProcStatus { pending: bit(9), ..s }.interrupted());
    }

    #[test]
    fn damaged_text_is_harmless() {
        assert!(!ProcStatus::parse("SigPnd:\tzz\nGroups:\tx y\nnoise").interrupted());
        assert!(status_of(std::process::id()).is_some());
    }
}
