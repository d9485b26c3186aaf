//! Calls hf-hub as an application would. Arguments: repository, revision, files.
//! HF_ENDPOINT and HF_HOME say where from and where to.
//!
//! Prints one JSON object: {"info": {"sha", "files"} or {"error"}, "files": {name: {"path"} or {"error"}}}.
use hf_hub::api::sync::{ApiBuilder, ApiError};
use hf_hub::{Repo, RepoType};
use serde_json::{json, Map, Value};

fn failed(e: ApiError) -> Value {
    json!({ "error": e.to_string() })
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let api = ApiBuilder::from_env().with_progress(false).build().expect("build the client");
    let repo = api.repo(Repo::with_revision(args[0].clone(), RepoType::Model, args[1].clone()));
    let info = match repo.info() {
        Ok(i) => json!({ "sha": i.sha, "files": i.siblings.iter().map(|s| s.rfilename.clone()).collect::<Vec<_>>() }),
        Err(e) => failed(e),
    };
    let mut files = Map::new();
    for name in &args[2..] {
        let got = match repo.get(name) {
            Ok(path) => json!({ "path": path }),
            Err(e) => failed(e),
        };
        files.insert(name.clone(), got);
    }
    println!("{}", json!({ "info": info, "files": files }));
}
