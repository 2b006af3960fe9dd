//! Takes calls: decodes them, keeps sessions alive, answers repeats from the dedupe records, and runs the operations.

use super::db::{self, Env, Rows, RowsMut};
use super::ops::{
    append, close, create, getattr, link, lookup, make, open, policy, readdir, rename, rmdir, session, setattr, unlink,
    written, xattr,
};
use super::records::{self, DedupeRecord, FLAG_TAIL_UNSURE, InodeRecord, RECORD_VERSION};
use super::repair::SESSION_TIMEOUT;
use super::store::{LogContext, Table};
use super::{MetaServer, unpoison};
use crate::base::codec;
use crate::base::error::ErrorCode;
use crate::base::ids::{ClientInstance, InodeId};
use crate::limits;
use crate::net::frame::CallContext;
use crate::net::msg::meta::*;
use crate::net::rpc::{Call, HandleFuture, RequestContext, Response, Service};
use bytes::Bytes;
use serde::Serialize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

impl Service for MetaServer {
    fn handle(self: Arc<Self>, ctx: RequestContext, method: u16, body: Bytes, _payload: Bytes) -> HandleFuture {
        Box::pin(async move {
            let reply = self.call(&ctx.call, method, &body).await?;
            Ok(Response { body: reply, payload: Bytes::new() })
        })
    }
}

fn decode<C: Call>(body: &[u8]) -> Result<C, ErrorCode> {
    codec::decode(body).map_err(|e| {
        tracing::warn!(error = %e, "bad message");
        ErrorCode::BadMessage
    })
}

/// A repeat's kept reply, or `None` for a new request. `SessionUnknown` without a session.
fn before(db: &dyn Rows, ctx: &CallContext) -> Result<Option<Vec<u8>>, ErrorCode> {
    if db.get(Table::Sessions, ctx.client_instance.0.as_bytes())?.is_none() {
        return Err(ErrorCode::SessionUnknown);
    }
    if ctx.slot >= limits::SESSION_SLOTS_MAX {
        return Err(ErrorCode::BadMessage);
    }
    match db::kept_reply(db, ctx.client_instance, ctx.slot)? {
        Some(kept) if kept.sequence == ctx.slot_sequence => match kept.error {
            0 => Ok(Some(kept.reply)),
            n => Err(ErrorCode::from_number(n)),
        },
        // An old request that was overtaken on the way; its answer has been taken already.
        Some(kept) if kept.sequence > ctx.slot_sequence => Err(ErrorCode::BadMessage),
        _ => Ok(None),
    }
}

/// Keeps the reply for repeats.
fn after(db: &mut dyn RowsMut, ctx: &CallContext, reply: Vec<u8>) -> Result<Vec<u8>, ErrorCode> {
    let kept = DedupeRecord { version: RECORD_VERSION, sequence: ctx.slot_sequence, reply, error: 0 };
    db::put(db, Table::Dedupe, &records::dedupe_key(ctx.client_instance, ctx.slot), &kept)?;
    Ok(kept.reply)
}

enum Step {
    Done(Vec<u8>),
    Cut(Box<InodeRecord>, u64),
}

impl MetaServer {
    /// One call; the encoded reply.
    pub(super) async fn call(
        self: &Arc<Self>,
        ctx: &CallContext,
        method: u16,
        body: &[u8],
    ) -> Result<Vec<u8>, ErrorCode> {
        if let Some(at) = unpoison(self.seen.lock()).get_mut(&ctx.client_instance) {
            *at = Instant::now();
        }
        let client = ctx.client_instance;
        macro_rules! read {
            ($t:ty, |$db:ident, $r:ident| $e:expr) => {{
                let $r: $t = decode(body)?;
                self.read(|$db| $e).map(|reply| codec::encode(&reply))
            }};
        }
        macro_rules! change {
            ($t:ty, $f:path) => {{
                let r: $t = decode(body)?;
                self.mutate(ctx, method, body, move |db, env| $f(db, env, &r)).await
            }};
        }
        if matches!(method, MakeRequest::METHOD | LinkRequest::METHOD | SetXattrRequest::METHOD) {
            self.check_room(ctx).await?;
        }
        match method {
            OpenSessionRequest::METHOD => self.open_session(ctx, decode(body)?).await,
            RenewSessionRequest::METHOD => {
                let known = unpoison(self.seen.lock()).contains_key(&client);
                if known { Ok(codec::encode(&())) } else { Err(ErrorCode::SessionUnknown) }
            }
            CloseSessionRequest::METHOD => self.end_session(client, false).await.map(|()| codec::encode(&())),
            LookupRequest::METHOD => {
                let env = self.env_for_reading(client, 0);
                read!(LookupRequest, |db, r| lookup::lookup(db, &env, &r))
            }
            LookupParentRequest::METHOD => read!(LookupParentRequest, |db, r| lookup::parent(db, &r)),
            GetAttrRequest::METHOD => read!(GetAttrRequest, |db, r| getattr::getattr(db, r.ino)),
            ReadLinkRequest::METHOD => read!(ReadLinkRequest, |db, r| getattr::readlink(db, r.ino)),
            LayoutRequest::METHOD => {
                let r: LayoutRequest = decode(body)?;
                self.quiesce(r.ino).await;
                self.read(|db| getattr::layout(db, &r)).map(|reply| codec::encode(&reply))
            }
            ReadDirRequest::METHOD => read!(ReadDirRequest, |db, r| readdir::readdir(db, &r)),
            GetXattrRequest::METHOD => read!(GetXattrRequest, |db, r| xattr::get(db, &r)),
            ListXattrRequest::METHOD => read!(ListXattrRequest, |db, r| xattr::list(db, &r)),
            EntryInfoRequest::METHOD => read!(EntryInfoRequest, |db, r| getattr::entry_info(db, r.ino)),
            SyncRequest::METHOD => {
                self.store.sync().await.map_err(|_| ErrorCode::DiskFailed)?;
                Ok(codec::encode(&()))
            }
            MetaStatusRequest::METHOD => self.status().map(|reply| codec::encode(&reply)),
            SetAttrRequest::METHOD => self.setattr(ctx, method, body).await,
            MakeRequest::METHOD => change!(MakeRequest, make::make),
            CreateRequest::METHOD => {
                let r: CreateRequest = decode(body)?;
                let env = self.env_for_reading(client, 0);
                match self.read(|db| db::dentry(db, &env, r.parent, &r.name))? {
                    Some(entry) => self.before_open(entry.ino, r.open).await?,
                    None => self.check_room(ctx).await?,
                }
                let reply = self.mutate(ctx, method, body, move |db, env| create::create(db, env, &r)).await;
                self.purge_wake.notify_one();
                reply
            }
            OpenRequest::METHOD => {
                let r: OpenRequest = decode(body)?;
                self.before_open(r.ino, r.open).await?;
                let truncate = r.open.truncate;
                let reply = self.mutate(ctx, method, body, move |db, env| open::open(db, env, &r)).await;
                if truncate {
                    self.purge_wake.notify_one();
                }
                reply
            }
            CloseRequest::METHOD => {
                let r: CloseRequest = decode(body)?;
                let trim = Arc::new(AtomicBool::new(false));
                let (ino, found) = (r.ino, trim.clone());
                let closing = self.mutate(ctx, method, body, move |db, _| {
                    found.store(close::close(db, client, &r)?, Ordering::Relaxed);
                    Ok(())
                });
                let reply = closing.await;
                if trim.load(Ordering::Relaxed) {
                    self.trim_later(ino);
                }
                reply
            }
            WrittenRequest::METHOD => {
                self.quiesce(decode::<WrittenRequest>(body)?.ino).await;
                change!(WrittenRequest, written::written)
            }
            AppendRequest::METHOD => {
                self.quiesce(decode::<AppendRequest>(body)?.ino).await;
                change!(AppendRequest, append::append)
            }
            UnlinkRequest::METHOD => {
                let reply = change!(UnlinkRequest, unlink::unlink);
                self.purge_wake.notify_one();
                reply
            }
            RemoveDirRequest::METHOD => change!(RemoveDirRequest, rmdir::rmdir),
            RenameRequest::METHOD => {
                let reply = change!(RenameRequest, rename::rename);
                self.purge_wake.notify_one();
                reply
            }
            LinkRequest::METHOD => change!(LinkRequest, link::link),
            SetXattrRequest::METHOD => change!(SetXattrRequest, xattr::set),
            RemoveXattrRequest::METHOD => change!(RemoveXattrRequest, xattr::remove),
            SetPolicyRequest::METHOD => change!(SetPolicyRequest, policy::set),
            _ => Err(ErrorCode::UnknownMethod),
        }
    }

    /// `NoSpace` when the disk is nearly full; what is left is for removing. A repeat of what was done gets its reply.
    async fn check_room(&self, ctx: &CallContext) -> Result<(), ErrorCode> {
        let is_new = || matches!(self.read(|db| before(db, ctx)), Ok(None));
        if self.store.has_room().await || !is_new() { Ok(()) } else { Err(ErrorCode::NoSpace) }
    }

    fn log(ctx: &CallContext, env: &Env, method: u16, body: &[u8]) -> LogContext {
        let mut operation = method.to_le_bytes().to_vec();
        operation.extend_from_slice(body);
        let seconds = u64::try_from(env.now.seconds).unwrap_or(0);
        LogContext {
            session: ctx.client_instance,
            slot: ctx.slot,
            slot_sequence: ctx.slot_sequence,
            time_ns: seconds.saturating_mul(1_000_000_000).saturating_add(u64::from(env.now.nanos)),
            operation,
        }
    }

    /// Runs a mutation once: a repeat gets the reply of the first time.
    async fn mutate<R: Serialize>(
        &self,
        ctx: &CallContext,
        method: u16,
        body: &[u8],
        f: impl FnOnce(&mut dyn RowsMut, &Env) -> Result<R, ErrorCode> + Send + 'static,
    ) -> Result<Vec<u8>, ErrorCode> {
        let env = self.env(ctx.client_instance)?;
        let (log, ctx) = (Self::log(ctx, &env, method, body), *ctx);
        let run = move |db: &mut dyn RowsMut, env: &Env| {
            if let Some(reply) = before(db, &ctx)? {
                return Ok(reply);
            }
            let reply = codec::encode(&f(db, env)?);
            after(db, &ctx, reply)
        };
        self.commit(log, env, run).await
    }

    async fn open_session(&self, ctx: &CallContext, r: OpenSessionRequest) -> Result<Vec<u8>, ErrorCode> {
        if ctx.client_instance == ClientInstance::default() {
            return Err(ErrorCode::BadMessage);
        }
        let epoch = self
            .commit(LogContext::default(), self.env(ctx.client_instance)?, move |db, env| session::open(db, env, &r));
        let session_epoch = epoch.await?;
        // A session whose loss would let orphans go is durable before it is used.
        self.store.sync().await.map_err(|_| ErrorCode::DiskFailed)?;
        unpoison(self.seen.lock()).insert(ctx.client_instance, Instant::now());
        Ok(codec::encode(&OpenSessionReply {
            session_epoch,
            slots: limits::SESSION_SLOTS_MAX,
            timeout_seconds: u32::try_from(SESSION_TIMEOUT.as_secs()).unwrap_or(60),
        }))
    }

    /// Waits for truncations in flight; trims an unsure tail before somebody may write behind it.
    async fn before_open(&self, ino: InodeId, mode: OpenMode) -> Result<(), ErrorCode> {
        self.quiesce(ino).await;
        if !mode.write {
            return Ok(());
        }
        let unsure =
            |db: &dyn Rows| db::inode(db, ino).is_ok_and(|i| i.flags & FLAG_TAIL_UNSURE != 0 && i.open_for_write == 0);
        if !self.read(unsure) {
            return Ok(());
        }
        if self.fence_pending(ino)? {
            return Err(ErrorCode::NotReady);
        }
        self.trim(ino).await
    }

    async fn setattr(self: &Arc<Self>, ctx: &CallContext, method: u16, body: &[u8]) -> Result<Vec<u8>, ErrorCode> {
        let r: SetAttrRequest = decode(body)?;
        if r.size.is_none() {
            return self.mutate(ctx, method, body, move |db, env| setattr::apply(db, env, &r)).await;
        }
        // The targets are cut by a task of its own: a caller that goes away does not stop it half-way.
        let (server, ctx, body) = (self.clone(), *ctx, body.to_vec());
        let task = self.tasks.spawn(async move { server.truncate(&ctx, method, &body, r).await });
        task.await.unwrap_or(Err(ErrorCode::Internal))
    }

    async fn truncate(
        &self,
        ctx: &CallContext,
        method: u16,
        body: &[u8],
        r: SetAttrRequest,
    ) -> Result<Vec<u8>, ErrorCode> {
        let ino = r.ino;
        let _guard = self.lock(ino).await;
        let env = self.env(ctx.client_instance)?;
        let (log, first, c) = (Self::log(ctx, &env, method, body), r.clone(), *ctx);
        let begin = move |db: &mut dyn RowsMut, env: &Env| {
            if let Some(reply) = before(db, &c)? {
                return Ok(Step::Done(reply));
            }
            if let Some((inode, size)) = setattr::begin(db, env, &first)? {
                return Ok(Step::Cut(Box::new(inode), size));
            }
            let reply = codec::encode(&setattr::apply(db, env, &first)?);
            Ok(Step::Done(after(db, &c, reply)?))
        };
        match self.commit(log, env, begin).await? {
            Step::Done(reply) => {
                self.purge_wake.notify_one();
                Ok(reply)
            }
            Step::Cut(inode, size) => {
                self.cut(ino, &inode, size).await?;
                let epoch = inode.data_epoch;
                self.mutate(ctx, method, body, move |db, env| {
                    setattr::cut_done(db, ino, epoch)?;
                    setattr::apply(db, env, &r)
                })
                .await
            }
        }
    }

    fn status(&self) -> Result<MetaStatusReply, ErrorCode> {
        let (inodes, queue) = self.read(|db| {
            Ok::<_, ErrorCode>((db::inode_count(db)?, db.scan(Table::Purge, &[], &[], usize::MAX)?.len()))
        })?;
        Ok(MetaStatusReply {
            inodes,
            purge_queue: u64::try_from(queue).unwrap_or(u64::MAX),
            purge_blocked_by: unpoison(self.blocked.lock()).iter().copied().collect(),
            sessions: u32::try_from(unpoison(self.seen.lock()).len()).unwrap_or(u32::MAX),
        })
    }
}
