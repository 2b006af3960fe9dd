use super::*;
use crate::base::format::lock;
use std::collections::BTreeMap;
use std::path::Path;

fn config(dir: &Path) -> StoreConfig {
    StoreConfig::new(dir.to_path_buf(), ClusterId::default(), 1)
}
fn open(dir: &Path) -> Result<Store, StoreError> {
    Store::open(config(dir), lock(dir).unwrap())
}
async fn put(s: &Store, k: &[u8], v: &[u8]) -> Result<Csn, CommitError<StoreError>> {
    let (k, v) = (k.to_vec(), v.to_vec());
    let r = s.commit(LogContext::default(), move |t| {
        t.put(Table::Inodes, &k, &v);
        Ok::<_, StoreError>(())
    });
    r.await.map(|r| r.1)
}
fn all(s: &Store) -> Vec<(Vec<u8>, Vec<u8>)> {
    s.read(|v| v.scan(Table::Inodes, b"", b"", usize::MAX)).unwrap()
}
fn segment(dir: &Path) -> PathBuf {
    log::list(&dir.join("log")).unwrap().pop().unwrap().1
}

#[tokio::test]
async fn random_ops_match_a_map_over_flushes_and_reopens() {
    let dir = tempfile::tempdir().unwrap();
    let mut s = open(dir.path()).unwrap();
    let mut model = BTreeMap::new();
    let mut x = 12345u64;
    for i in 0..1500u64 {
        x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let key = vec![u8::try_from((x >> 33) % 97).unwrap()];
        let value = i.to_le_bytes().to_vec();
        if (x >> 20).is_multiple_of(3) {
            model.remove(&key);
            let k = key.clone();
            let f = move |t: &mut Txn<'_>| {
                t.delete(Table::Inodes, &k);
                t.get(Table::Inodes, &k)
            };
            assert_eq!(s.commit(LogContext::default(), f).await.unwrap().0, None);
        } else {
            put(&s, &key, &value).await.unwrap();
            model.insert(key, value);
        }
        if i % 211 == 0 {
            s.flush().await.unwrap();
        }
        if i % 397 == 0 {
            let before = s.last();
            if i % 2 == 0 {
                s.abandon()
            } else {
                s.close().await
            }
            s = open(dir.path()).unwrap();
            assert!(s.last().epoch > before.epoch && s.last().sequence == before.sequence);
        }
        if i % 50 == 0 {
            assert_eq!(all(&s), model.clone().into_iter().collect::<Vec<_>>());
        }
    }
    assert_eq!(all(&s), model.into_iter().collect::<Vec<_>>());
    s.close().await;
}

#[tokio::test]
async fn log_cut_anywhere_reopens_with_a_prefix() {
    let dir = tempfile::tempdir().unwrap();
    let s = open(dir.path()).unwrap();
    for i in 0..3u8 {
        put(&s, &[i], b"v").await.unwrap();
    }
    s.abandon();
    let path = segment(dir.path());
    let (data, db) = (std::fs::read(&path).unwrap(), std::fs::read(dir.path().join("meta.redb")).unwrap());
    for cut in 56..=data.len() {
        let d = tempfile::tempdir().unwrap();
        std::fs::create_dir(d.path().join("log")).unwrap();
        std::fs::write(d.path().join("meta.redb"), &db).unwrap();
        std::fs::write(d.path().join("log").join(path.file_name().unwrap()), &data[..cut]).unwrap();
        let s = open(d.path()).unwrap();
        let record = (data.len() - 56) / 3;
        assert_eq!(all(&s).len(), (cut - 56) / record);
        s.abandon();
    }
}

#[tokio::test]
async fn damage_of_durable_records_and_second_open_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let s = open(dir.path()).unwrap();
    assert!(lock(dir.path()).unwrap_err().why.contains(&std::process::id().to_string()));
    put(&s, b"a", b"1").await.unwrap();
    assert!(s.read(|v| v.changed_by(Table::Inodes, b"a")).is_some());
    let csn = s.sync().await.unwrap();
    assert_eq!((s.durable(), s.durable()), (csn, s.last()));
    assert!(s.read(|v| v.changed_by(Table::Inodes, b"a")).is_none());
    put(&s, b"b", b"2").await.unwrap();
    s.abandon();
    let path = segment(dir.path());
    let mut data = std::fs::read(&path).unwrap();
    data[80] ^= 1;
    std::fs::write(&path, data).unwrap();
    assert!(matches!(open(dir.path()), Err(StoreError::Damaged(_))));
}

#[tokio::test]
async fn a_newer_log_is_refused_and_kept() {
    let dir = tempfile::tempdir().unwrap();
    let s = open(dir.path()).unwrap();
    put(&s, b"a", b"1").await.unwrap();
    s.abandon();
    let path = segment(dir.path());
    let own = std::fs::read(&path).unwrap();
    let open_with = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let error = open(dir.path()).err().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
        error
    };
    // A shorter header than ours is no torn one.
    for newer in [&[&own[..8], &[2, 0, 0, 0], &own[12..]].concat(), &[&own[..8], &[2, 0, 0, 0][..]].concat()] {
        let error = open_with(newer);
        let text = error.to_string();
        assert!(matches!(error, StoreError::Newer(_)), "{text}");
        assert!(text.contains("version 2") && text.contains("up to 1") && text.contains(".log"), "{text}");
    }
    assert!(matches!(open_with(&[&own[..8], &[0; 4], &own[12..]].concat()), StoreError::Damaged(_)));
    std::fs::write(&path, &own).unwrap();
    assert_eq!(all(&open(dir.path()).unwrap()).len(), 1);
}

#[tokio::test]
async fn failed_write_or_sync_fences() {
    for write in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let s = open(dir.path()).unwrap();
        put(&s, b"a", b"1").await.unwrap();
        let fail = if write { &s.0.shared.fail.write } else { &s.0.shared.fail.sync };
        fail.store(true, Ordering::Relaxed);
        if write {
            assert!(put(&s, b"b", b"2").await.is_err())
        } else {
            assert!(s.sync().await.is_err())
        }
        fail.store(false, Ordering::Relaxed);
        assert!(put(&s, b"c", b"3").await.is_err() && s.sync().await.is_err() && s.flush().await.is_err());
        s.abandon();
        assert_eq!(all(&open(dir.path()).unwrap()).len(), 1);
    }
}

#[tokio::test]
async fn ids_are_never_issued_twice() {
    let dir = tempfile::tempdir().unwrap();
    let mut seen = std::collections::HashSet::new();
    for _ in 0..4 {
        // A refill in flight keeps its clone, and so the directory's lock, for a moment.
        let mut free = lock(dir.path());
        for _ in 0..200 {
            if free.is_ok() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
            free = lock(dir.path());
        }
        let s = Store::open(config(dir.path()), free.unwrap()).unwrap();
        let ids = s.id_allocator("inode", 16).await.unwrap();
        for _ in 0..100 {
            match ids.next() {
                Some(id) => assert!(seen.insert(id)),
                None => tokio::time::sleep(Duration::from_millis(2)).await,
            }
        }
        drop(ids);
        s.abandon();
    }
    assert!(seen.len() > 64);
}
