//! Sessions.

use super::super::db::{self, Env, RowsMut};
use super::super::records::{self, FLAG_MAY_HAVE_CHUNKS, FenceRecord, OpensRecord, RECORD_VERSION, SessionRecord};
use super::super::store::Table;
use super::close;
use crate::base::error::ErrorCode;
use crate::base::ids::{ClientInstance, InodeId};
use crate::net::msg::meta::OpenSessionRequest;

/// Opens or finds a session, and registers the files that the client still has open. Returns its epoch.
pub fn open(db: &mut dyn RowsMut, env: &Env, r: &OpenSessionRequest) -> Result<u64, ErrorCode> {
    let key = env.client.0.as_bytes().to_vec();
    let session = match db::get::<SessionRecord>(db, Table::Sessions, &key)? {
        Some(s) => s,
        None => {
            let host: String = r.host.chars().take(255).collect();
            let s = SessionRecord { version: RECORD_VERSION, host, epoch: env.fresh, opened: env.now };
            db::put(db, Table::Sessions, &key, &s)?;
            s
        }
    };
    for held in &r.reclaim {
        let Ok(mut inode) = db::inode(db, held.ino) else { continue };
        let key = records::opens_key(held.ino, env.client);
        let before: OpensRecord = db::get(db, Table::Opens, &key)?.unwrap_or_default();
        if before.writers == 0 && held.writers > 0 {
            inode.open_for_write = inode.open_for_write.saturating_add(1);
            inode.flags |= FLAG_MAY_HAVE_CHUNKS;
        }
        if before.writers > 0 && held.writers == 0 {
            inode.open_for_write = inode.open_for_write.saturating_sub(1);
        }
        if held.readers > 0 || held.writers > 0 {
            let now = OpensRecord { version: RECORD_VERSION, readers: held.readers, writers: held.writers };
            db::put(db, Table::Opens, &key, &now)?;
        } else {
            db.delete(Table::Opens, &key)?;
        }
        db::put_inode(db, held.ino, &inode)?;
    }
    Ok(session.epoch)
}

/// Ends a session: its handles are closed. Returns the files whose tails are to be trimmed. An evicted one that had files
/// open for writing leaves a durable order to fence it.
pub fn end(db: &mut dyn RowsMut, client: ClientInstance, evicted: bool) -> Result<Vec<InodeId>, ErrorCode> {
    let mut trim = Vec::new();
    let mut targets = Vec::new();
    for (key, value) in db.scan(Table::Opens, &[], &[], usize::MAX)? {
        if records::client_at(&key, 8)? != client {
            continue;
        }
        let ino = InodeId(records::number_at(&key, 0)?);
        let wrote = records::decode::<OpensRecord>(Table::Opens, &key, &value)?.writers > 0;
        if wrote
            && evicted
            && let Ok(inode) = db::inode(db, ino)
            && let Some(pattern) = &inode.pattern
        {
            targets.extend_from_slice(pattern.targets());
        }
        if close::drop_session(db, client, ino, evicted)? {
            trim.push(ino);
        }
    }
    targets.sort_unstable();
    targets.dedup();
    if !targets.is_empty() {
        let fence = FenceRecord { version: RECORD_VERSION, targets, inodes: trim.clone() };
        db::put(db, Table::Intents, &records::fence_key(client), &fence)?;
    }
    let prefix = client.0.as_bytes().to_vec();
    for (key, _) in db.scan(Table::Dedupe, &prefix, &prefix, usize::MAX)? {
        db.delete(Table::Dedupe, &key)?;
    }
    db.delete(Table::Sessions, &prefix)?;
    Ok(trim)
}
