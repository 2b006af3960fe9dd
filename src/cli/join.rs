//! A node's certificate: taken from disk, or asked for with a join token; renewed while the process runs.

use crate::base::error::ErrorCode;
use crate::base::ids::Role;
use crate::base::start::StartError;
use crate::config::Config;
use crate::net::cluster::{Cluster, MGMT};
use crate::net::endpoint::{Connection, Endpoint};
use crate::net::frame::CallContext;
use crate::net::identity::{self, Identity};
use crate::net::join::{self, JoinToken};
use crate::net::msg::mgmt::{JoinRequest, RenewRequest, WantedNode};
use crate::roles::mgmt::Mgmt;
use bytes::Bytes;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio_util::sync::CancellationToken;

/// Between two looks at the certificate's end.
const RENEW_PAUSE: Duration = Duration::from_secs(3600);
/// Times that joining is tried while mgmt does not answer (about a second apart): both may have been started together.
const JOIN_ATTEMPTS: u32 = 30;

/// The identity in `dir`; or, when there is none, a new one for the join token.
pub async fn load_or_join(
    config: &Config,
    name: &str,
    dir: &Path,
    mgmt: &[SocketAddr],
) -> Result<Identity, StartError> {
    if dir.join("node.crt").exists() {
        let identity = Identity::load(dir).map_err(|e| {
            StartError::new(
                "read this node's certificate",
                e,
                "Restore the directory from a backup, or remove the node and join again.",
            )
        })?;
        check(config, &identity, dir)?;
        return Ok(identity);
    }
    let Some(file) = &config.join_token_file else {
        return Err(StartError::new(
            "join the cluster",
            format!("this node has no certificate yet ({} is empty) and no join token was given", dir.display()),
            "A new node: run `beeswarm cluster token` on mgmt's machine, put the line into a file, and add --join-token-file \
             FILE. One that has joined before: mount its disk (findmnt), or correct the directory.",
        ));
    };
    let text = std::fs::read_to_string(file).map_err(|e| {
        StartError::new(format!("read the join token {}", file.display()), e, "Check the path and its permissions.")
    })?;
    let token: JoinToken = text.parse().map_err(|e| {
        StartError::new(
            format!("use the join token in {}", file.display()),
            e,
            "Copy the whole line that `beeswarm cluster token` printed.",
        )
    })?;
    let identity = join_cluster(config, name, &token, mgmt).await?;
    identity
        .save(dir)
        .map_err(|e| StartError::new("save this node's certificate", e, "Check the disk and its permissions."))?;
    let ids: Vec<String> = identity.nodes().iter().map(ToString::to_string).collect();
    println!(
        "beeswarm joined the cluster {} as {}; certificate in {}",
        identity.cluster,
        ids.join(", "),
        dir.display()
    );
    Ok(identity)
}

/// The certificate must be of the roles and the number asked for.
fn check(config: &Config, identity: &Identity, dir: &Path) -> Result<(), StartError> {
    let mut roles: Vec<Role> = identity.nodes().iter().map(|n| n.role).collect();
    roles.sort();
    let shown = |roles: &[Role]| roles.iter().map(|r| r.as_str()).collect::<Vec<_>>().join(",");
    if roles != config.roles {
        return Err(StartError::new(
            format!("start as {}", shown(&config.roles)),
            format!("the certificate in {} is for {}", dir.display(), shown(&roles)),
            "Use another directory for another role.",
        ));
    }
    if let Some(wanted) = config.node_id
        && let Some(found) = identity.nodes().iter().find(|n| n.number != wanted)
    {
        return Err(StartError::new(
            format!("start as number {wanted}"),
            format!("the certificate in {} is for {found}", dir.display()),
            "Leave -s away, or use another directory for another node.",
        ));
    }
    Ok(())
}

async fn join_cluster(
    config: &Config,
    name: &str,
    token: &JoinToken,
    mgmt: &[SocketAddr],
) -> Result<Identity, StartError> {
    let what = format!("join the cluster at {}", config.mgmt.as_deref().unwrap_or("mgmt"));
    let internal = |e: crate::net::NetError| StartError::new(&what, e, "");
    let (key_pem, csr_pem) = identity::new_key_and_csr().map_err(internal)?;
    let connection = connect(&what, token, mgmt).await?;
    let exporter = connection.exporter(join::EXPORTER_LABEL).map_err(internal)?;
    let request = JoinRequest {
        token_id: token.id,
        proof: join::proof(&token.secret, &exporter, &csr_pem),
        csr_pem,
        nodes: config.roles.iter().map(|&role| WantedNode { role, number: config.node_id }).collect(),
        name: name.to_owned(),
    };
    let answer = connection.call_once(&CallContext::default(), &request, Bytes::new()).await;
    let (reply, _) = answer.map_err(|e| StartError::new(&what, e, advice(e)))?;
    connection.close("joined");
    Identity::new(reply.ca_pem, reply.cert_pem, key_pem).map_err(internal)
}

fn advice(error: ErrorCode) -> &'static str {
    match error {
        ErrorCode::BadToken => {
            "The token is used up, expired, or not for this role. `beeswarm cluster token` makes another."
        }
        ErrorCode::Conflict => {
            "mgmt's log says whose. Choose another number with -s (`beeswarm node list` shows those in use), or leave -s \
             away. There can be one meta node only."
        }
        _ => "mgmt's log says more.",
    }
}

async fn connect(what: &str, token: &JoinToken, mgmt: &[SocketAddr]) -> Result<Connection, StartError> {
    let mut why = "mgmt has no address".to_owned();
    for attempt in 0..JOIN_ATTEMPTS {
        for addr in mgmt {
            match Endpoint::connect_pinned(*addr, token.ca_fingerprint).await {
                Ok(connection) if connection.nodes().contains(&MGMT) => return Ok(connection),
                Ok(connection) => {
                    connection.close("not mgmt");
                    return Err(StartError::new(
                        what,
                        format!("{addr} is not mgmt but {}", connection.describe()),
                        "Correct -m.",
                    ));
                }
                Err(e) => why = e.to_string(),
            }
        }
        // The wrong authority stays the wrong one.
        if why.contains("fingerprint") {
            break;
        }
        if attempt == 0 {
            tracing::warn!("mgmt cannot be reached yet: {why}");
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let todo =
        "Check that mgmt runs, that -m names it, that its UDP port is open, and that the token is of this cluster.";
    Err(StartError::new(what, why, todo))
}

/// Renews the certificate once a third of its life has passed; with mgmt in the process, by mgmt itself.
pub async fn renew_for_ever(
    endpoint: Endpoint,
    cluster: Arc<Cluster>,
    mgmt: Option<Arc<Mgmt>>,
    dir: PathBuf,
    name: String,
    cancel: CancellationToken,
) {
    loop {
        let current = endpoint.identity();
        let left =
            current.not_after().ok().and_then(|end| end.duration_since(SystemTime::now()).ok()).unwrap_or_default();
        if left < Duration::from_secs(u64::from(identity::CERTIFICATE_DAYS) * 86400 / 3 * 2) {
            let renewed = match &mgmt {
                Some(mgmt) => renew_here(mgmt, &current, &name),
                None => renew_at_mgmt(&cluster, &current, &dir).await,
            };
            match renewed.and_then(|new| endpoint.set_identity(Arc::new(new)).map_err(|e| e.to_string())) {
                Ok(()) => tracing::info!("renewed this node's certificate"),
                Err(e) => tracing::warn!(
                    "cannot renew this node's certificate: {e}; {} days are left",
                    left.as_secs() / 86400
                ),
            }
        }
        tokio::select! {
            () = tokio::time::sleep(RENEW_PAUSE) => {}
            () = cancel.cancelled() => return,
        }
    }
}

fn renew_here(mgmt: &Mgmt, current: &Identity, name: &str) -> Result<Identity, String> {
    let wanted: Vec<WantedNode> =
        current.nodes().iter().map(|n| WantedNode { role: n.role, number: Some(n.number) }).collect();
    mgmt.issue_local(&wanted, name).map_err(|e| e.to_string())
}

async fn renew_at_mgmt(cluster: &Cluster, current: &Identity, dir: &Path) -> Result<Identity, String> {
    let csr_pem = identity::csr_from_key(&current.key_pem).map_err(|e| e.to_string())?;
    let (ctx, request) = (CallContext::default(), RenewRequest { csr_pem });
    let call = cluster.call(MGMT, &ctx, &request, Bytes::new(), Duration::from_secs(60));
    let (reply, _) = call.await.map_err(|e| e.to_string())?;
    let new = Identity::new(reply.ca_pem, reply.cert_pem, current.key_pem.clone()).map_err(|e| e.to_string())?;
    new.save(dir).map_err(|e| e.to_string())?;
    Ok(new)
}
