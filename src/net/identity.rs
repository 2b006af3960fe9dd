//! Who a process is: the cluster's certificate authority, and the certificate and key of a node.
//!
//! A node's certificate has the DNS name `<cluster>.beeswarm.internal` and one URI `beeswarm://<cluster>/<role>/<number>`
//! for each role that the process plays. Only what the authority writes counts: names in a signing request are ignored.

use super::{NetError, Result};
use crate::base::durable;
use crate::base::ids::{ClusterId, NodeId};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, PublicKeyData, SanType,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use x509_parser::extensions::GeneralName;

/// Days that a node's certificate lives unless the caller says otherwise; renewed at a third.
pub const CERTIFICATE_DAYS: u32 = 90;
const CA_DAYS: u32 = 20 * 365;
const DAY: Duration = Duration::from_secs(24 * 3600);
const CA_FILE: &str = "ca.crt";
const CERT_FILE: &str = "node.crt";
const KEY_FILE: &str = "node.key";

fn bad(what: &str, why: impl std::fmt::Display) -> NetError {
    NetError::Identity(format!("{what}: {why}"))
}

/// The DNS name in every certificate of a cluster.
pub fn server_name(cluster: ClusterId) -> String {
    format!("{cluster}.beeswarm.internal")
}

/// SHA-256 of a certificate's DER bytes.
pub fn fingerprint_of(cert_der: &[u8]) -> [u8; 32] {
    let digest = ring::digest::digest(&ring::digest::SHA256, cert_der);
    let mut out = [0; 32];
    out.copy_from_slice(digest.as_ref());
    out
}

/// Lower-case hex, for messages.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// The cluster's certificate authority. Held by mgmt.
pub struct CertificateAuthority {
    cluster: ClusterId,
    cert_pem: String,
    cert_der: CertificateDer<'static>,
    key_pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl std::fmt::Debug for CertificateAuthority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CertificateAuthority").field("cluster", &self.cluster).finish_non_exhaustive()
    }
}

impl CertificateAuthority {
    /// A new authority with a new key, for a new cluster.
    pub fn generate(cluster: ClusterId) -> Result<CertificateAuthority> {
        let what = "cannot make the certificate authority";
        let key = KeyPair::generate().map_err(|e| bad(what, e))?;
        let mut params = CertificateParams::default();
        params.distinguished_name = common_name(&format!("beeswarm cluster {cluster}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages =
            vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
        params.subject_alt_names = vec![uri(&format!("beeswarm://{cluster}"))?];
        set_validity(&mut params, CA_DAYS)?;
        let cert = params.self_signed(&key).map_err(|e| bad(what, e))?;
        Self::from_pem(&cert.pem(), &key.serialize_pem())
    }

    /// An authority read back from where it was kept.
    pub fn from_pem(cert_pem: &str, key_pem: &str) -> Result<CertificateAuthority> {
        let what = "certificate authority";
        let cert_der = cert_from_pem(cert_pem, what)?;
        let key = KeyPair::from_pem(key_pem).map_err(|e| bad("key of the certificate authority", e))?;
        if public_key_of(&cert_der)? != key.public_key_raw() {
            return Err(bad(what, "its key does not belong to its certificate"));
        }
        let cluster = cluster_of_ca(&cert_der)?;
        let issuer = Issuer::from_ca_cert_der(&cert_der, key).map_err(|e| bad(what, e))?;
        Ok(Self { cluster, cert_pem: cert_pem.to_owned(), cert_der, key_pem: key_pem.to_owned(), issuer })
    }

    /// The cluster that it is of.
    pub fn cluster(&self) -> ClusterId {
        self.cluster
    }

    /// Its certificate, which every node keeps.
    pub fn cert_pem(&self) -> &str {
        &self.cert_pem
    }

    /// Its secret key.
    pub fn key_pem(&self) -> &str {
        &self.key_pem
    }

    /// SHA-256 of its certificate: what a join token carries.
    pub fn fingerprint(&self) -> [u8; 32] {
        fingerprint_of(&self.cert_der)
    }

    /// A certificate for the key in a signing request. Checks the request's signature; ignores every name in it.
    pub fn issue_from_csr(&self, csr_pem: &str, nodes: &[NodeId], valid_days: u32) -> Result<String> {
        let csr = CertificateSigningRequestParams::from_pem(csr_pem).map_err(|e| bad("signing request refused", e))?;
        self.issue(&csr.public_key, nodes, valid_days)
    }

    /// An identity with a key of its own, for the process that holds the authority.
    pub fn issue_self(&self, nodes: &[NodeId]) -> Result<Identity> {
        let key = KeyPair::generate().map_err(|e| bad("cannot make a key", e))?;
        let cert_pem = self.issue(&key, nodes, CERTIFICATE_DAYS)?;
        Ok(Identity {
            cluster: self.cluster,
            ca_cert_pem: self.cert_pem.clone(),
            cert_pem,
            key_pem: key.serialize_pem(),
        })
    }

    fn issue(&self, key: &impl PublicKeyData, nodes: &[NodeId], valid_days: u32) -> Result<String> {
        if nodes.is_empty() {
            return Err(bad("cannot issue a certificate", "it would name no node"));
        }
        let names: Vec<String> = nodes.iter().map(ToString::to_string).collect();
        let mut params = CertificateParams::default();
        params.distinguished_name = common_name(&format!("beeswarm {}", names.join(" ")));
        params.is_ca = IsCa::ExplicitNoCa;
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let dns = server_name(self.cluster).try_into().map_err(|e| bad("cluster id", e))?;
        params.subject_alt_names.push(SanType::DnsName(dns));
        for node in nodes {
            params.subject_alt_names.push(uri(&format!("beeswarm://{}/{}/{}", self.cluster, node.role, node.number))?);
        }
        set_validity(&mut params, valid_days)?;
        let cert = params.signed_by(key, &self.issuer).map_err(|e| bad("cannot issue a certificate", e))?;
        Ok(cert.pem())
    }
}

fn common_name(name: &str) -> DistinguishedName {
    let mut out = DistinguishedName::new();
    out.push(DnType::CommonName, name);
    out
}

fn uri(text: &str) -> Result<SanType> {
    Ok(SanType::URI(text.try_into().map_err(|e| bad("name in a certificate", e))?))
}

fn set_validity(params: &mut CertificateParams, days: u32) -> Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_err(|e| bad("system clock is before 1970", e))?;
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    // A day back: a node whose clock runs behind must not find its certificate not yet valid.
    params.not_before = epoch + now.saturating_sub(DAY);
    params.not_after = epoch + (now + DAY * days);
    Ok(())
}

/// A new key, and a signing request for it. The key never leaves the node.
pub fn new_key_and_csr() -> Result<(String, String)> {
    let key = KeyPair::generate().map_err(|e| bad("cannot make a key", e))?;
    let key_pem = key.serialize_pem();
    let csr_pem = csr_from_key(&key_pem)?;
    Ok((key_pem, csr_pem))
}

/// A signing request for a key that is there already: renewal keeps the key, so no crash can part key and certificate.
pub fn csr_from_key(key_pem: &str) -> Result<String> {
    let what = "cannot make a signing request";
    let key = KeyPair::from_pem(key_pem).map_err(|e| bad(what, e))?;
    let mut params = CertificateParams::default();
    params.distinguished_name = common_name("beeswarm node");
    params.serialize_request(&key).and_then(|csr| csr.pem()).map_err(|e| bad(what, e))
}

/// A node's certificate and key, with the authority that it trusts.
#[derive(Clone)]
pub struct Identity {
    /// The cluster.
    pub cluster: ClusterId,
    /// Certificate of the cluster's authority.
    pub ca_cert_pem: String,
    /// Own certificate.
    pub cert_pem: String,
    /// Own secret key.
    pub key_pem: String,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity").field("cluster", &self.cluster).field("nodes", &self.nodes()).finish_non_exhaustive()
    }
}

impl Identity {
    /// An identity of parts that came over the network or from disk; checks that they belong together.
    pub fn new(ca_cert_pem: String, cert_pem: String, key_pem: String) -> Result<Identity> {
        let cert = cert_from_pem(&cert_pem, "node certificate")?;
        let (cluster, _) = parse_peer(&cert)?;
        let ca_cluster = cluster_of_ca(&cert_from_pem(&ca_cert_pem, "authority's certificate")?)?;
        if ca_cluster != cluster {
            return Err(bad(
                "node certificate",
                format!("is of cluster {cluster}, the authority of cluster {ca_cluster}"),
            ));
        }
        let key = KeyPair::from_pem(&key_pem).map_err(|e| bad("node key", e))?;
        if public_key_of(&cert)? != key.public_key_raw() {
            return Err(bad("node certificate", "does not belong to the node key"));
        }
        Ok(Identity { cluster, ca_cert_pem, cert_pem, key_pem })
    }

    /// Writes `ca.crt`, `node.crt` and `node.key` into `dir`; each is replaced as a whole, and durable on return.
    pub fn save(&self, dir: &Path) -> Result<()> {
        let make = fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
        make.map_err(NetError::io(format!("make directory {}", dir.display())))?;
        for (name, text) in [(KEY_FILE, &self.key_pem), (CA_FILE, &self.ca_cert_pem), (CERT_FILE, &self.cert_pem)] {
            let path = dir.join(name);
            durable::write_file(&path, text.as_bytes(), durable::SECRET)
                .map_err(NetError::io(format!("write {}", path.display())))?;
        }
        Ok(())
    }

    /// Reads what `save` wrote.
    pub fn load(dir: &Path) -> Result<Identity> {
        let read = |name: &str| {
            let path = dir.join(name);
            fs::read_to_string(&path).map_err(NetError::io(format!("read {}", path.display())))
        };
        Identity::new(read(CA_FILE)?, read(CERT_FILE)?, read(KEY_FILE)?)
            .map_err(|e| NetError::Identity(format!("{}: {e}", dir.display())))
    }

    /// The nodes that the certificate names.
    pub fn nodes(&self) -> Vec<NodeId> {
        let cert = cert_from_pem(&self.cert_pem, "node certificate");
        cert.and_then(|cert| parse_peer(&cert)).map(|(_, nodes)| nodes).unwrap_or_default()
    }

    /// When the certificate ends.
    pub fn not_after(&self) -> Result<SystemTime> {
        let der = cert_from_pem(&self.cert_pem, "node certificate")?;
        let (_, cert) = x509_parser::parse_x509_certificate(&der).map_err(|e| bad("node certificate", e))?;
        let seconds = u64::try_from(cert.validity().not_after.timestamp()).map_err(|e| bad("node certificate", e))?;
        Ok(UNIX_EPOCH + Duration::from_secs(seconds))
    }

    /// Own certificate followed by the authority's: what is sent in the handshake, so that a joining node can compare
    /// the authority's fingerprint.
    pub fn chain(&self) -> Result<Vec<CertificateDer<'static>>> {
        Ok(vec![cert_from_pem(&self.cert_pem, "node certificate")?, self.ca_cert()?])
    }

    /// Certificate of the authority.
    pub fn ca_cert(&self) -> Result<CertificateDer<'static>> {
        cert_from_pem(&self.ca_cert_pem, "authority's certificate")
    }

    /// Own key.
    pub fn key(&self) -> Result<PrivateKeyDer<'static>> {
        PrivateKeyDer::from_pem_slice(self.key_pem.as_bytes()).map_err(|e| bad("node key", e))
    }
}

fn cert_from_pem(pem: &str, what: &str) -> Result<CertificateDer<'static>> {
    CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|e| bad(what, e))
}

fn public_key_of(cert_der: &[u8]) -> Result<Vec<u8>> {
    let (_, cert) = x509_parser::parse_x509_certificate(cert_der).map_err(|e| bad("certificate", e))?;
    Ok(cert.public_key().subject_public_key.data.to_vec())
}

fn uris_of(cert_der: &[u8]) -> Result<Vec<String>> {
    let (_, cert) = x509_parser::parse_x509_certificate(cert_der).map_err(|e| bad("certificate", e))?;
    let names = cert.subject_alternative_name().map_err(|e| bad("certificate", e))?;
    let mut out = Vec::new();
    for name in names.map(|n| n.value.general_names.as_slice()).unwrap_or_default() {
        if let GeneralName::URI(text) = name
            && let Some(rest) = text.strip_prefix("beeswarm://")
        {
            out.push(rest.to_owned());
        }
    }
    Ok(out)
}

fn cluster_of_ca(cert_der: &[u8]) -> Result<ClusterId> {
    let what = "authority's certificate";
    let uris = uris_of(cert_der)?;
    let [cluster] = uris.as_slice() else { return Err(bad(what, "names no beeswarm cluster")) };
    cluster.parse().map_err(|e| bad(what, e))
}

/// The cluster and the nodes that a certificate names. Does not check its signature: TLS did.
pub fn parse_peer(cert_der: &[u8]) -> Result<(ClusterId, Vec<NodeId>)> {
    let what = "certificate";
    let mut cluster = None;
    let mut nodes = Vec::new();
    for uri in uris_of(cert_der)? {
        let mut parts = uri.split('/');
        let (Some(id), Some(role), Some(number), None) = (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(bad(what, format!("'{uri}' is not of the form cluster/role/number")));
        };
        let id: ClusterId = id.parse().map_err(|e| bad(what, e))?;
        if *cluster.get_or_insert(id) != id {
            return Err(bad(what, "names two clusters"));
        }
        nodes.push(format!("{role}:{number}").parse().map_err(|e: String| bad(what, e))?);
    }
    match cluster {
        Some(cluster) => Ok((cluster, nodes)),
        None => Err(bad(what, "names no beeswarm node")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ids::Role;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn issue_from_csr_names_only_what_the_authority_says() {
        let cluster = ClusterId::random();
        let ca = CertificateAuthority::generate(cluster).unwrap();
        let key = KeyPair::generate().unwrap();
        let mut asked = CertificateParams::default();
        asked.subject_alt_names = vec![uri(&format!("beeswarm://{cluster}/mgmt/1")).unwrap()];
        let csr = asked.serialize_request(&key).unwrap().pem().unwrap();
        let nodes = [NodeId::new(Role::Storage, 3), NodeId::new(Role::Meta, 1)];
        let cert = ca.issue_from_csr(&csr, &nodes, 30).unwrap();
        let identity = Identity::new(ca.cert_pem().into(), cert, key.serialize_pem()).unwrap();
        assert_eq!(identity.nodes(), nodes);
        assert_eq!(identity.cluster, cluster);
        let left = identity.not_after().unwrap().duration_since(SystemTime::now()).unwrap();
        assert!(left > DAY * 29 && left <= DAY * 30);
    }

    #[test]
    fn issue_from_csr_refuses_a_damaged_request() {
        let ca = CertificateAuthority::generate(ClusterId::random()).unwrap();
        let (_, csr) = new_key_and_csr().unwrap();
        let middle = csr.len() / 2;
        let other = if csr.as_bytes()[middle] == b'A' { "B" } else { "A" };
        let damaged = format!("{}{other}{}", &csr[..middle], &csr[middle + 1..]);
        assert!(ca.issue_from_csr(&damaged, &[NodeId::new(Role::Client, 1)], 1).is_err());
        assert!(ca.issue_from_csr("rubbish", &[NodeId::new(Role::Client, 1)], 1).is_err());
        assert!(ca.issue_from_csr(&csr, &[], 1).is_err());
    }

    #[test]
    fn authority_and_identity_survive_being_kept() {
        let ca = CertificateAuthority::generate(ClusterId::random()).unwrap();
        let again = CertificateAuthority::from_pem(ca.cert_pem(), ca.key_pem()).unwrap();
        assert_eq!((again.cluster(), again.fingerprint()), (ca.cluster(), ca.fingerprint()));
        let identity = again.issue_self(&[NodeId::new(Role::Mgmt, 1)]).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let inside = dir.path().join("tls");
        identity.save(&inside).unwrap();
        identity.save(&inside).unwrap();
        let loaded = Identity::load(&inside).unwrap();
        assert_eq!(loaded.key_pem, identity.key_pem);
        assert_eq!(loaded.nodes(), [NodeId::new(Role::Mgmt, 1)]);
        assert_eq!(fs::metadata(inside.join(KEY_FILE)).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(&inside).unwrap().count(), 3);
        fs::write(inside.join(KEY_FILE), new_key_and_csr().unwrap().0).unwrap();
        assert!(Identity::load(&inside).unwrap_err().to_string().contains("does not belong"));
    }
}
